#!/usr/bin/env bash
# Runs the topology that the script is named after (its links: p2_d1.sh, mixed_tp1.sh, ...) with MTP depth 3, on the
# CPU reference platform. Every option of `sglang-hetero up` may follow, e.g.: launch/p2_d1.sh --model tiny-moe --mtp 0
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
topology=$(basename "${BASH_SOURCE[0]}" .sh)
if [ "$topology" = up ]; then
    topology=${1:?usage: launch/up.sh TOPOLOGY [OPTIONS]}
    shift
fi
command=$here/../.venv/bin/sglang-hetero
if [ ! -x "$command" ] && ! command=$(command -v sglang-hetero); then
    echo "launch: sglang-hetero is not installed: run \`make setup\` in the checkout first" >&2
    exit 1
fi
exec "$command" up "$topology" --mtp 3 "$@"
