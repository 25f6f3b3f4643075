#!/usr/bin/env bash
# What works on this host with Ascend NPUs: `sglang-hetero validate` with CANN's variables and the scripts of launch/.
# LAUNCH_CHIP=910b or a3. OPTIONS as that command has them; docs/validate.md says what the lines mean.
lib=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../lib
# shellcheck source-path=SCRIPTDIR source=../lib/common.sh
. "$lib/common.sh"
check_settings
# shellcheck source-path=SCRIPTDIR source=../lib/ascend.sh
. "$lib/ascend.sh"
setting LAUNCH_PYTHON python3
platform_settings
# Servers on a host without the chip's name would not start: better to be told before an hour of other stages.
case ${LAUNCH_CHIP:-} in
910b | a3) export LAUNCH_CHIP ;;
*) die "LAUNCH_CHIP=${LAUNCH_CHIP:-}: must be 910b (Atlas 800I A2) or a3 (Atlas 800I A3)" ;;
esac
export LAUNCH_PYTHON
exec "$LAUNCH_PYTHON" -m sglang_hetero validate --device npu --fleet "$lib/fleet.sh" "$@"
