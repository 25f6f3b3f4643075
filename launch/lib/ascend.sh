# shellcheck shell=bash
# What is particular to Ascend NPUs. Sourced by serve.sh and validate.sh; launch/README.md says what was tried.

# Ranks of a server exchange activations by HCCL; prefill and decode exchange caches by MemFabric.
# shellcheck disable=SC2034 # serve.sh reads it
transfer_backend=ascend
# shellcheck disable=SC2034 # validate.sh reads it, too
platform_device=npu
# Where CANN and the driver are installed.
ascend_folder=/usr/local/Ascend

platform_settings() {
    # SGLang's own default on NPUs, and the block size of the seed. Equal on both sides.
    setting LAUNCH_PAGE 128
    # CANN's variables, unless the image or the login shell has them. From 8.5 on it installs itself in `cann`, before
    # that in `ascend-toolkit`; its operators for attention lie beside it. Its scripts use variables that are not set.
    if [ -z "${ASCEND_TOOLKIT_HOME:-${ASCEND_HOME_PATH:-}}" ]; then
        local toolkit=$ascend_folder/cann script
        [ -f "$toolkit/set_env.sh" ] || toolkit=$ascend_folder/ascend-toolkit
        set +u
        for script in "$toolkit/set_env.sh" "$ascend_folder/nnal/atb/set_env.sh"; do
            # shellcheck disable=SC1090
            [ ! -f "$script" ] || . "$script"
        done
        set -u
    fi
}

# What a host must have been told before anything is started there.
platform_check() {
    case ${LAUNCH_CHIP:-} in
    910b | a3) export LAUNCH_CHIP ;;
    *) die "LAUNCH_CHIP=${LAUNCH_CHIP:-}: must be 910b (Atlas 800I A2) or a3 (Atlas 800I A3)" ;;
    esac
}

# platform_environment ROLE
platform_environment() {
    # Segments that grow instead of blocks of fixed sizes: long prompts leave less memory unused.
    environment PYTORCH_NPU_ALLOC_CONF expandable_segments:True
    # Streams per device that torch_npu deals out; the transfer has one of its own.
    environment STREAMS_PER_DEVICE 32
    # Collectives are scheduled on the vector cores, not by the host.
    environment HCCL_OP_EXPANSION_MODE AIV
    # Each rank stays on the CPU cores near its NPU.
    environment SGLANG_SET_CPU_AFFINITY 1
    # The host's network interface for setting up collectives, where it has several.
    if [ -n "${LAUNCH_NIC:-}" ]; then
        environment HCCL_SOCKET_IFNAME "$LAUNCH_NIC"
        environment GLOO_SOCKET_IFNAME "$LAUNCH_NIC"
    fi
    [ "$1" != mixed ] || return 0
    # MemFabric's way between NPUs: over the RoCE ports of a 910B, over the HCCS fabric of an A3.
    platform_check
    case $LAUNCH_CHIP in
    910b) environment ASCEND_MF_TRANSFER_PROTOCOL device_rdma ;;
    a3) environment ASCEND_MF_TRANSFER_PROTOCOL sdma ;;
    esac
    # MemFabric's config store, an address and no name. SGLang's prefill makes one there, unless store.sh runs. With
    # MemFabric 1.0 the engines find each other there; from 1.1.6 on they take no more than its tcp:// (docs/ascend.md).
    [[ ${ASCEND_MF_STORE_URL:-} =~ ^tcp://([^/:]+):([0-9]+)$ ]] ||
        die "ASCEND_MF_STORE_URL=${ASCEND_MF_STORE_URL:-}: must be tcp://ADDRESS:PORT, the same for all servers"
    local host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]} address
    if [[ ! $host =~ ^[0-9.]+$ ]] && [ -z "${print:-}" ]; then
        address=$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }')
        [ -n "$address" ] || die "ASCEND_MF_STORE_URL: the name $host has no IPv4 address"
        ASCEND_MF_STORE_URL=tcp://$address:$port
    fi
    environment ASCEND_MF_STORE_URL "$ASCEND_MF_STORE_URL"
}

platform_options() {
    options+=(
        --device "$platform_device"
        # The only attention of SGLang on NPUs.
        --attention-backend ascend
        # The decode kernel of gated-delta-net layers takes the SSM states for bf16 whatever they are and checks nothing
        # (sgl-kernel-npu, docs/ascend.md); checkpoints say float32. The same on both sides.
        --mamba-ssm-dtype bfloat16
    )
}
