#!/usr/bin/env bash
# What works on this host (Ascend NPUs). LAUNCH_CHIP=910b or a3; options and lines: docs/validate.md.
exec "$(dirname "$(readlink -f "$0")")/../lib/validate.sh" ascend "$@"
