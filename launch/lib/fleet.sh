#!/usr/bin/env bash
# fleet.sh PLATFORM TOPOLOGY [--print] [OPTIONS]: all servers of a topology and the router before them, on this host,
# until SIGINT or SIGTERM. --print shows them instead. OPTIONS of SGLang go to each server (python -m
# sglang.launch_server --help). Prints READY and the URL for clients when all of them serve; when one ends, the others
# are stopped. Settings are LAUNCH_ variables (launch/README.md). The scripts in launch/ascend and launch/cuda call it;
# serve.sh runs each process.
lib=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$lib/common.sh"
# Asked in the place of any of ours, or first of SGLang's.
usage "${BASH_SOURCE[0]}" "${*:1:3}"
check_settings

(($# >= 2)) || die "usage: fleet.sh PLATFORM TOPOLOGY [--print] [OPTIONS]"
platform=$1 topology=$2
shift 2
print=()
if [ "${1:-}" = --print ]; then
    print=(--print)
    shift
fi
setting LAUNCH_PYTHON python3
setting LAUNCH_IP 127.0.0.1
setting LAUNCH_PORT 30000
setting LAUNCH_ROUTER_HOST 0.0.0.0
setting LAUNCH_BOOTSTRAP_PORT 8998
setting LAUNCH_FIRST_DEVICE 0
setting LAUNCH_LOGS "out/launch/$topology"
# Loading a model and capturing its graphs takes minutes; an hour is a fault.
setting LAUNCH_START_SECONDS 3600
# For requests under way when all is stopped; then SIGKILL.
setting LAUNCH_STOP_SECONDS 30
for name in LAUNCH_PORT LAUNCH_BOOTSTRAP_PORT LAUNCH_START_SECONDS LAUNCH_STOP_SECONDS; do
    whole "$name" 1
done
whole LAUNCH_FIRST_DEVICE 0
export LAUNCH_PYTHON LAUNCH_IP
unset LAUNCH_NODES LAUNCH_NODE LAUNCH_LEADER
# All of it is on this host. SGLang asks its own servers by HTTP, and would ask a proxy of the environment for them.
# The variable has two names; where a shell has both, most programs read the small one.
not_proxied=${no_proxy:-${NO_PROXY:-}}
export no_proxy="$LAUNCH_IP,127.0.0.1,localhost${not_proxied:+,$not_proxied}"
export NO_PROXY=$no_proxy
if [ "$platform" = ascend ] && [ "$topology" != "${topology#p}" ]; then
    # Where MemFabric's config store is; the prefill server makes it, or where there are several, store.sh does.
    export ASCEND_MF_STORE_URL="${ASCEND_MF_STORE_URL:-tcp://$LAUNCH_IP:24669}"
fi

# A line per server: its name, role and TP. What a topology's name means is written in one place, the launcher's.
servers=$(PYTHONPATH="$lib/../..${PYTHONPATH:+:$PYTHONPATH}" "$LAUNCH_PYTHON" - "$topology" <<'PYTHON'
import sys
from sglang_hetero.launcher import topology
try:
    found = topology.parse(sys.argv[1])
except topology.TopologyNameError as error:
    sys.exit(f"launch: {error}")
if any(one.dp > 1 for one in found.instances):
    sys.exit("launch: attention-DP: start the servers one by one, with --attn-dp-size")
for one in found.instances:
    print(one.name, one.role.value, one.tp)
PYTHON
)

# From a server's port to that at which its ranks meet: behind the ports of the largest fleet.
NCCL_PORTS=100

names=() pids=()
stop() {
    trap '' INT TERM
    local pid deadline=$((SECONDS + LAUNCH_STOP_SECONDS)) left=1
    # Each runs in a process group of its own, with all that came from it.
    for pid in ${pids[@]+"${pids[@]}"}; do
        kill -TERM -- "-$pid" 2>/dev/null || true
    done
    while ((left && SECONDS < deadline)); do
        left=0
        for pid in ${pids[@]+"${pids[@]}"}; do
            ! kill -0 -- "-$pid" 2>/dev/null || left=1
        done
        ((!left)) || sleep 0.2
    done
    for pid in ${pids[@]+"${pids[@]}"}; do
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
    wait 2>/dev/null || true
}

# start NAME ROLE [OPTIONS]: in the background, its output in a file; with --print in the foreground.
start() {
    local name=$1 role=$2
    shift 2
    if [ ${#print[@]} != 0 ]; then
        echo "# $name"
        "$lib/serve.sh" "$platform" "$role" --print "$@"
        return
    fi
    set -m # a process group for each
    "$lib/serve.sh" "$platform" "$role" "$@" >"$LAUNCH_LOGS/$name.log" 2>&1 </dev/null &
    set +m
    names+=("$name")
    pids+=($!)
    echo "launch: $name is process $!, its log $LAUNCH_LOGS/$name.log" >&2
}

# The first process that has ended, with what it said last; the fleet goes with it.
check_alive() {
    local i code
    for i in "${!pids[@]}"; do
        if ! kill -0 "${pids[i]}" 2>/dev/null; then
            code=0
            wait "${pids[i]}" || code=$?
            tail -n 20 "$LAUNCH_LOGS/${names[i]}.log" >&2
            die "${names[i]} has ended with exit status $code; its log is $LAUNCH_LOGS/${names[i]}.log"
        fi
    done
}

# wait_for URL: until it answers 200.
wait_for() {
    while ! "$LAUNCH_PYTHON" - "$1" 2>/dev/null <<'PYTHON'
import sys
from urllib.request import ProxyHandler, build_opener
build_opener(ProxyHandler({})).open(sys.argv[1], timeout=5)
PYTHON
    do
        check_alive
        ((SECONDS < LAUNCH_START_SECONDS)) || die "$1 does not answer after $LAUNCH_START_SECONDS s; see $LAUNCH_LOGS"
        sleep 1
    done
}

if [ ${#print[@]} = 0 ]; then
    mkdir -p "$LAUNCH_LOGS"
    trap stop EXIT
    trap 'exit 0' INT TERM
fi

if [ "$platform" = ascend ] && [ "$(grep -c ' prefill ' <<<"$servers")" -gt 1 ]; then
    start store store
fi
port=$LAUNCH_PORT bootstrap=$LAUNCH_BOOTSTRAP_PORT device=$LAUNCH_FIRST_DEVICE
health=() router=()
while read -r name role tp; do
    # The fleet's own port is the router's; servers have the ones behind it. A mixed server needs no router.
    [ "$role" = mixed ] || port=$((port + 1))
    export LAUNCH_TP=$tp LAUNCH_PORT=$port LAUNCH_BOOTSTRAP_PORT=$bootstrap LAUNCH_FIRST_DEVICE=$device
    # Of the ports that SGLang would choose itself, two servers that start at once may choose the same.
    start "$name" "$role" --nccl-port "$((port + NCCL_PORTS))" "$@"
    url=http://$LAUNCH_IP:$port
    health+=("$url/health")
    case $role in
    prefill) router+=(--prefill "$url" "$bootstrap") bootstrap=$((bootstrap + 1)) ;;
    decode) router+=(--decode "$url") ;;
    esac
    device=$((device + tp))
done <<<"$servers"

if [ ${#router[@]} = 0 ]; then
    url=http://$LAUNCH_IP:$port
else
    LAUNCH_ROUTER_PORT=$((port - ${#health[@]}))
    export LAUNCH_ROUTER_HOST LAUNCH_ROUTER_PORT
    start router router "${router[@]}"
    url=http://127.0.0.1:$LAUNCH_ROUTER_PORT
    [ "$LAUNCH_ROUTER_HOST" = 0.0.0.0 ] || url=http://$LAUNCH_ROUTER_HOST:$LAUNCH_ROUTER_PORT
    health+=("$url/readiness")
fi
[ ${#print[@]} = 0 ] || exit 0

for address in "${health[@]}"; do
    wait_for "$address"
done
echo "READY $url"
while :; do
    check_alive
    sleep 1
done
