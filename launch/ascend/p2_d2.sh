#!/usr/bin/env bash
# Topology p2_d2 on this host (Ascend NPUs). Settings and options: launch/README.md. --print shows all commands.
exec "$(dirname "$(readlink -f "$0")")/../lib/fleet.sh" ascend p2_d2 "$@"
