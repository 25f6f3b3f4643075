#!/usr/bin/env bash
# What works on this host (NVIDIA GPUs). Options and lines: docs/validate.md.
exec "$(dirname "$(readlink -f "$0")")/../lib/validate.sh" cuda "$@"
