#!/usr/bin/env bash
# A prefill server (Ascend NPUs). Settings and options: launch/README.md. --print shows it.
exec "$(dirname "$(readlink -f "$0")")/../lib/serve.sh" ascend prefill "$@"
