#!/usr/bin/env bash
# serve.sh PLATFORM ROLE [--print] [OPTIONS]: one process of a fleet, on this host, in the foreground.
#   PLATFORM  ascend or cuda
#   ROLE      prefill, decode, mixed (a server for both phases), router, or with ascend store
#   --print   show environment and command instead of running it
#   OPTIONS   of SGLang (python -m sglang.launch_server --help), or of `sglang-hetero router`; they come last, so that
#             they win over the ones here
# The scripts in launch/ascend and launch/cuda call it. Settings are LAUNCH_ variables (launch/README.md), and those of
# docs/options.md: SGLANG_HETERO_ETCD makes servers register themselves and the router follow them.
# shellcheck disable=SC2153 # `setting` of common.sh assigns them
lib=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$lib/common.sh"
# Asked in the place of any of ours, or first of SGLang's.
usage "${BASH_SOURCE[0]}" "${*:1:3}"
check_settings

(($# >= 2)) || die "usage: serve.sh PLATFORM ROLE [--print] [OPTIONS]"
platform=$1 role=$2
shift 2
print=
if [ "${1:-}" = --print ]; then
    print=1
    shift
fi
setting LAUNCH_PYTHON python3

# The end of every way through this script. A command that was replaced by another process gets its signals itself.
run() {
    if [ -n "$print" ]; then
        show "$@"
    else
        exec "$@"
    fi
}

case $role in
router)
    setting LAUNCH_ROUTER_HOST 0.0.0.0
    setting LAUNCH_ROUTER_PORT 8000
    whole LAUNCH_ROUTER_PORT 1
    # Which servers: --prefill URL PORT --decode URL behind this script, or SGLANG_HETERO_ETCD (docs/router.md).
    run "$LAUNCH_PYTHON" -m sglang_hetero router --host "$LAUNCH_ROUTER_HOST" --port "$LAUNCH_ROUTER_PORT" "$@"
    exit
    ;;
store)
    [ "$platform" = ascend ] || die "only MemFabric needs a store"
    # MemFabric's own program. It listens at the address in that URL, so it runs on that host.
    [ -n "${ASCEND_MF_STORE_URL:-}" ] || die "set ASCEND_MF_STORE_URL=tcp://ADDRESS:PORT, an address of this host"
    environment MF_CONFIG_STORE_URL "$ASCEND_MF_STORE_URL"
    run "$LAUNCH_PYTHON" -m memfabric_hybrid.launch_ascend_mf_store "$@"
    exit
    ;;
prefill) setting LAUNCH_TP 2 ;;
decode) setting LAUNCH_TP 1 ;;
mixed) setting LAUNCH_TP 2 ;;
*) die "unknown role $role: prefill, decode, mixed, router or store" ;;
esac

case $platform in
ascend | cuda)
    # shellcheck source-path=SCRIPTDIR source=ascend.sh
    . "$lib/$platform.sh"
    ;;
*) die "unknown platform $platform: ascend or cuda; for the CPU reference platform see launch/up.sh" ;;
esac

setting LAUNCH_MODEL Qwen/Qwen3.5-2B
setting LAUNCH_MODEL_NAME "$(basename "$LAUNCH_MODEL")"
setting LAUNCH_FIRST_DEVICE 0
setting LAUNCH_PORT 30000
setting LAUNCH_BOOTSTRAP_PORT 8998
setting LAUNCH_MTP 3
setting LAUNCH_CHUNK 8192
setting LAUNCH_REQUESTS 32
# LeaderWorkerSet of Kubernetes tells how many nodes share a server, which one this is, and where the first one is.
setting LAUNCH_NODES "${LWS_GROUP_SIZE:-1}"
setting LAUNCH_NODE "${LWS_WORKER_INDEX:-0}"
setting LAUNCH_LEADER "${LWS_LEADER_ADDRESS:+$LWS_LEADER_ADDRESS:20000}"
platform_settings
for name in LAUNCH_TP LAUNCH_PORT LAUNCH_BOOTSTRAP_PORT LAUNCH_CHUNK LAUNCH_PAGE LAUNCH_REQUESTS LAUNCH_NODES; do
    whole "$name" 1
done
whole LAUNCH_FIRST_DEVICE 0
whole LAUNCH_MTP 0
whole LAUNCH_NODE 0

options=(
    # The checkpoint, with its MTP module in it: a folder, or a name on the hub. The same for prefill and decode.
    --model-path "$LAUNCH_MODEL"
    # What clients call it. The router pairs servers of one name only.
    --served-model-name "$LAUNCH_MODEL_NAME"
    # Where it listens: at that address only, or everywhere. Decode finds prefill's bootstrap server at the same host.
    --host "${LAUNCH_IP:-0.0.0.0}"
    --port "$LAUNCH_PORT"
    # Ranks, a device each, all nodes of the server together. This is what may differ between prefill and decode.
    --tp-size "$LAUNCH_TP"
    # The first device that it takes on this host; its ranks take the following ones.
    --base-gpu-id "$LAUNCH_FIRST_DEVICE"
    # Tokens per page of the KV cache. Prefill and decode must have the same.
    --page-size "$LAUNCH_PAGE"
    # Chunked prefill: a longer prompt is computed in steps of so many tokens, and each layer's share of a step is sent
    # while the next layers compute.
    --chunked-prefill-size "$LAUNCH_CHUNK"
    # Requests that run at the same time. SGLang derives the slots of the linear state from it, we the staging.
    --max-running-requests "$LAUNCH_REQUESTS"
    # No prefix cache, as the seed measured.
    --disable-radix-cache
    # GET /metrics, with the figures of the transfer (docs/state.md, docs/perf.md).
    --enable-metrics
    # The overlap schedule (the host prepares the next step while the device runs this one) is SGLang's default: what
    # turns it off is --disable-overlap-schedule.
)

if ((LAUNCH_MTP > 0)); then
    options+=(
        # The checkpoint's own MTP module drafts, a chain of so many tokens, and the target checks them at once, with
        # the token before them. The draft's KV cache is handed over, too; where the two sides have different depths,
        # docs/speculation.md says what it costs.
        # The seed kept the draft's body at TP1; SGLang has no option for that: its NEXTN draft has the target's TP, and
        # its cache is merged like the others.
        --speculative-algorithm NEXTN
        --speculative-num-steps "$LAUNCH_MTP"
        --speculative-eagle-topk 1
        --speculative-num-draft-tokens "$((LAUNCH_MTP + 1))"
    )
fi

if [ -n "${LAUNCH_MEMORY:-}" ]; then
    # Share of a device's memory for weights and caches. SGLang computes one; lower it where start-up says that staging
    # or activations do not fit.
    options+=(--mem-fraction-static "$LAUNCH_MEMORY")
fi

if ((LAUNCH_NODES > 1)); then
    [ -n "$LAUNCH_LEADER" ] || die "LAUNCH_LEADER: the first node's ADDRESS:PORT, for a server on $LAUNCH_NODES nodes"
    options+=(
        # One server on several nodes: how many, which one this is (0: the one with the HTTP server), and where its
        # ranks meet.
        --nnodes "$LAUNCH_NODES"
        --node-rank "$LAUNCH_NODE"
        --dist-init-addr "$LAUNCH_LEADER"
    )
fi

if [ "$role" != mixed ]; then
    options+=(
        # Which phase this server does; without it, both.
        --disaggregation-mode "$role"
        # What moves the bytes between prefill and decode.
        --disaggregation-transfer-backend "$transfer_backend"
    )
fi
if [ "$role" = prefill ]; then
    # Where decode asks for this server's ranks. On one host each prefill server needs its own.
    options+=(--disaggregation-bootstrap-port "$LAUNCH_BOOTSTRAP_PORT")
else
    options+=(
        # Decode steps are replayed as graphs, one for each number of requests, so that a step is never padded.
        --cuda-graph-backend-decode full
        --cuda-graph-bs-decode
    )
    for ((size = 1; size <= LAUNCH_REQUESTS; size++)); do
        options+=("$size")
    done
fi
platform_options "$role"

# The address at which the other servers and the router reach this one; else SGLang takes that of the interface with the
# default route.
[ -z "${LAUNCH_IP:-}" ] || environment SGLANG_HOST_IP "$LAUNCH_IP"
platform_environment "$role"
[ -n "$print" ] || check_installed
run "$LAUNCH_PYTHON" -m sglang.launch_server "${options[@]}" "$@"
