# shellcheck shell=bash
# What is particular to NVIDIA GPUs. Sourced by serve.sh and validate.sh; launch/README.md says what was tried.

# shellcheck disable=SC2034 # serve.sh reads it
transfer_backend=mooncake
# shellcheck disable=SC2034 # validate.sh reads it, too
platform_device=cuda

platform_settings() {
    # Caches are sent in pages: with SGLang's default, pages of one token, a prompt would have as many pieces as tokens.
    # Equal on both sides.
    setting LAUNCH_PAGE 64
}

# What a host must have been told before anything is started there: nothing.
platform_check() {
    :
}

platform_environment() {
    if [ -n "${LAUNCH_NIC:-}" ]; then
        environment NCCL_SOCKET_IFNAME "$LAUNCH_NIC"
        environment GLOO_SOCKET_IFNAME "$LAUNCH_NIC"
    fi
    # Mooncake sends by RDMA. Without such a device: export MC_FORCE_TCP=1, which is slow.
}

# platform_options ROLE
platform_options() {
    options+=(--device "$platform_device")
    if [ "$1" = prefill ]; then
        # No graphs for prompts: a replayed graph hides its layers, and each layer's caches could be sent only at the
        # end of the chunk (docs/transfer.md). Chunks of thousands of tokens gain little from a graph.
        options+=(--cuda-graph-backend-prefill disabled)
    fi
    if [ "$1" != mixed ] && [ -n "${LAUNCH_IB_DEVICE:-}" ]; then
        # RDMA devices for the caches, e.g. mlx5_0 or mlx5_0,mlx5_1; without it Mooncake takes those near the GPU.
        options+=(--disaggregation-ib-device "$LAUNCH_IB_DEVICE")
    fi
}
