#!/usr/bin/env bash
# Topology mixed_tp4 on this host (NVIDIA GPUs). Settings and options: launch/README.md. --print shows all commands.
exec "$(dirname "$(readlink -f "$0")")/../lib/fleet.sh" cuda mixed_tp4 "$@"
