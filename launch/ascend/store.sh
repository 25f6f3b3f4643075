#!/usr/bin/env bash
# MemFabric's store (Ascend NPUs). Settings and options: launch/README.md. --print shows it.
exec "$(dirname "$(readlink -f "$0")")/../lib/serve.sh" ascend store "$@"
