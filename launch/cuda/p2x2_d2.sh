#!/usr/bin/env bash
# Topology p2x2_d2 on this host (NVIDIA GPUs). Settings and options: launch/README.md. --print shows all commands.
exec "$(dirname "$(readlink -f "$0")")/../lib/fleet.sh" cuda p2x2_d2 "$@"
