# shellcheck shell=bash
# What the scripts of launch/ share: messages, settings, and how a command is shown or run. Sourced by serve.sh and
# fleet.sh; knows no SGLang.
set -euo pipefail

die() {
    echo "launch: $*" >&2
    exit 1
}

# wants_help WORD...: whether one of them asks for it.
wants_help() {
    [[ " $* " =~ \ (-h|--help)\  ]]
}

# usage SCRIPT WORDS: where one of them asks for help, what the script says of itself at its head, and the end.
usage() {
    wants_help "$2" || return 0
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1" | grep -v '^shellcheck '
    exit 0
}

# Every LAUNCH_ variable that there is: launch/README.md has the same list (a test compares the two).
known=(
    LAUNCH_MODEL LAUNCH_MODEL_NAME LAUNCH_TP LAUNCH_FIRST_DEVICE LAUNCH_IP LAUNCH_PORT LAUNCH_BOOTSTRAP_PORT
    LAUNCH_ROUTER_HOST LAUNCH_ROUTER_PORT LAUNCH_MTP LAUNCH_CHUNK LAUNCH_PAGE LAUNCH_REQUESTS LAUNCH_MEMORY
    LAUNCH_NODES LAUNCH_NODE LAUNCH_LEADER LAUNCH_NIC LAUNCH_CHIP LAUNCH_IB_DEVICE LAUNCH_PLATFORM LAUNCH_PYTHON
    LAUNCH_LOGS LAUNCH_START_SECONDS LAUNCH_STOP_SECONDS
)

# A misspelt setting would be ignored, and the server would be another one than was asked for.
check_settings() {
    local name
    while read -r name; do
        [[ " ${known[*]} " == *" $name "* ]] || die "$name is no setting; launch/README.md has the list"
    done < <(compgen -e LAUNCH_)
}

# setting NAME DEFAULT: what is not set, or empty, gets the default.
setting() {
    [[ " ${known[*]} " == *" $1 "* ]] || die "$1 is missing in the list of common.sh"
    [ -n "${!1:-}" ] || printf -v "$1" %s "$2"
}

# whole NAME LEAST: a number, or the end with what is wrong. Options of SGLang that come from it are numbers, too.
whole() {
    if [[ ! ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((${!1} < $2)); then
        die "$1=${!1}: must be a whole number from $2 on"
    fi
}

# environment NAME DEFAULT: exports it to the server; what the caller has set stays. `--print` shows these.
exported=()
environment() {
    [ -n "${!1:-}" ] || printf -v "$1" %s "$2"
    export "${1?}"
    exported+=("$1")
}

# show COMMAND...: environment and command as lines that a shell reads back.
show() {
    local name
    for name in ${exported[@]+"${exported[@]}"}; do
        printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf '%q ' "$@"
    echo
}

# SGLang without our plugin would start as well, and take its own path (docs/support.md). So it is asked for first.
check_installed() {
    local remedy="in the checkout of sglang-hetero: pip install . with the pip of your SGLang's Python, $LAUNCH_PYTHON"
    "$LAUNCH_PYTHON" - <<'PYTHON' || die "$remedy"
import sys
from importlib.metadata import entry_points
names = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
sys.exit(None if "hetero" in names else "launch: this Python has no sglang-hetero")
PYTHON
}
