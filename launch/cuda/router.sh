#!/usr/bin/env bash
# The router (NVIDIA GPUs). Settings and options: launch/README.md. --print shows it.
exec "$(dirname "$(readlink -f "$0")")/../lib/serve.sh" cuda router "$@"
