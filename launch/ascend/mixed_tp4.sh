#!/usr/bin/env bash
# Topology mixed_tp4 on this host (Ascend NPUs). Settings and options: launch/README.md. --print shows all commands.
exec "$(dirname "$(readlink -f "$0")")/../lib/fleet.sh" ascend mixed_tp4 "$@"
