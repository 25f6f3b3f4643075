#!/usr/bin/env bash
# validate.sh PLATFORM [OPTIONS]: what works on this host, by `sglang-hetero validate` with what the platform needs
# around it and the scripts of launch/. OPTIONS as that command has them; docs/validate.md says what the lines mean.
# The scripts launch/ascend/validate.sh and launch/cuda/validate.sh call it.
lib=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$lib/common.sh"
check_settings

(($# >= 1)) || die "usage: validate.sh PLATFORM [OPTIONS]"
platform=$1
shift
case $platform in
ascend | cuda)
    # shellcheck source-path=SCRIPTDIR source=ascend.sh
    . "$lib/$platform.sh"
    ;;
*) die "unknown platform $platform: ascend or cuda; for the CPU reference platform: sglang-hetero validate" ;;
esac
setting LAUNCH_PYTHON python3
platform_settings
# Servers on a host that cannot have them would not start: better to be told before an hour of other stages.
wants_help "$@" || platform_check
export LAUNCH_PYTHON
# shellcheck disable=SC2154 # the platform's file has assigned it
exec "$LAUNCH_PYTHON" -m sglang_hetero validate --device "$platform_device" --fleet "$lib/fleet.sh" "$@"
