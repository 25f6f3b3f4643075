"""What this package, and the parts of SGLang 0.5.23 that it relies on, use of the vendors' packages.

One entry a name, as it would be written behind an import. tests/unit/ascend/test_vendor_surface.py compares this with
the sources that use the names and with the wheels that have them.
"""

from dataclasses import dataclass

VERSIONS = {
    "torch_npu": "2.13.0",
    "memfabric_hybrid": "1.3.0",
    "mooncake_transfer_engine_npu": "0.3.13.post1",
    "triton_ascend": "3.2.0",
}
"""Of the wheels that were looked at, as in requirements/*ascend.lock."""


@dataclass(frozen=True)
class Call:
    """How this package calls a name. positional: arguments without self."""

    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()


DEVICE = (
    Call("torch_npu.npu.set_device", 1),
    Call("torch_npu.npu.current_device"),
    Call("torch_npu.npu.mem_get_info", 1),
    Call("torch_npu.npu.get_device_properties", 1),
    Call("torch_npu.npu.Stream", keywords=("device",)),
    Call("torch_npu.npu.stream", 1),
    Call("torch_npu.npu.Event"),
)
"""What sglang_hetero/device.py calls of the module that torch.get_device_module gives."""

OBJECTS = (
    Call("torch_npu.npu.Stream.synchronize"),
    Call("torch_npu.npu.Event.record", 1),
    Call("torch_npu.npu.Event.record"),
    Call("torch_npu.npu.Event.query"),
)
"""Of what those give."""

PROPERTIES = ("name", "vector_core_num")
"""Of a device's properties (sglang_hetero/merge/chip.py)."""

MEMFABRIC = {
    "batch_register_memory": 2,
    "unregister_memory": 1,
    "batch_transfer_sync_write": 4,
    "batch_transfer_sync_read": 4,
}
"""Methods of memfabric_hybrid.TransferEngine that sglang_hetero/transfer/engine calls, and their arguments."""

MOONCAKE = (
    "batch_register_memory",
    "batch_unregister_memory",
    "batch_transfer_sync_write",
    "batch_transfer_sync_read",
    "transfer_submit_write",
    "transfer_check_status",
    "send_probe",
)
"""The same of mooncake.engine.TransferEngine; send_probe only where there is one."""

TRITON = ("NPUUtils.get_device_properties", "NPUDriver.get_current_device")
"""Of triton-ascend's driver (sglang_hetero/merge/chip.py, where torch_npu does not tell the number of cores)."""
KERNEL = ("CompiledKernel._init_handles",)
"""Of Triton, its releases for NPUs and others alike: loads what was built (sglang_hetero/merge/triton_ops.py)."""

SGLANG_FILES = (
    "disaggregation/ascend/conn.py",
    "disaggregation/ascend/transfer_engine.py",
    "distributed/bootstrap.py",
    "distributed/device_communicators/mooncake_transfer_engine.py",
    "distributed/parallel_state.py",
    "hardware_backend/npu/allocator_npu.py",
    "hardware_backend/npu/attention/ascend_backend.py",
    "hardware_backend/npu/attention/ascend_gdn_backend.py",
    "hardware_backend/npu/attention/ascend_hybrid_linear_attn_backend.py",
    "hardware_backend/npu/attention/ascend_kda_backend.py",
    "hardware_backend/npu/cmo.py",
    "hardware_backend/npu/graph_runner/npu_cudagraph_backend.py",
    "hardware_backend/npu/graph_runner/npu_graph_runner.py",
    "hardware_backend/npu/memory_pool_npu.py",
    "hardware_backend/npu/utils.py",
    "managers/disagg_service.py",
    "model_executor/runner_backend_utils/weak_ref_tensor.py",
    "utils/common.py",
)
"""Of sglang/srt: what a hybrid model and its hand-over go through on an NPU."""

SGLANG_ENGINES = {
    "disaggregation/ascend/transfer_engine.py": {"get_rpc_port", "initialize", "batch_register_memory"},
    "distributed/device_communicators/mooncake_transfer_engine.py": {
        "get_rpc_port",
        "initialize",
        "register_memory",
        "unregister_memory",
        "batch_register_memory",
        "batch_unregister_memory",
        "transfer_sync_write",
        "batch_transfer_sync_write",
        "send_probe",
        "get_engine",
    },
}
"""Methods that SGLang calls of the two native engines, which it keeps as `self.engine`."""

SGLANG = {
    "memfabric_hybrid.TransferEngine",
    "memfabric_hybrid.create_config_store",
    "mooncake.engine.TransferEngine",
    "torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options",
    "torch_npu._C._weak_ref_tensor",
    "torch_npu._npu_flash_attention_qlens",
    "torch_npu._npu_fused_infer_attention_score_get_max_workspace",
    "torch_npu._npu_paged_attention",
    "torch_npu._npu_paged_attention_mla",
    "torch_npu._npu_reshape_and_cache",
    "torch_npu.contrib.transfer_to_npu",
    "torch_npu.npu",
    "torch_npu.npu.NPUGraph",
    "torch_npu.npu.Stream",
    "torch_npu.npu.current_device",
    "torch_npu.npu.current_stream",
    "torch_npu.npu.device_count",
    "torch_npu.npu.empty_cache",
    "torch_npu.npu.get_device_name",
    "torch_npu.npu.graph",
    "torch_npu.npu.is_available",
    "torch_npu.npu.mem_get_info",
    "torch_npu.npu.set_compile_mode",
    "torch_npu.npu.stream",
    "torch_npu.npu.synchronize",
    "torch_npu.npu_attention_update",
    "torch_npu.npu_dynamic_quant",
    "torch_npu.npu_format_cast",
    "torch_npu.npu_fused_infer_attention_score",
    "torch_npu.npu_fused_infer_attention_score.out",
    "torch_npu.npu_fused_infer_attention_score_v2",
    "torch_npu.npu_kv_quant_sparse_flash_attention",
    "torch_npu.npu_prefetch",
    "torch_npu.npu_scatter_nd_update_",
    "torch_npu.npu_scatter_pa_kv_cache",
    "torch_npu.npu_sparse_flash_attention",
    "torch_npu.profiler.ExportType.Text",
    "torch_npu.profiler.ProfilerActivity",
    "torch_npu.profiler.ProfilerLevel.Level1",
    "torch_npu.profiler._ExperimentalConfig",
    "torch_npu.profiler.profile",
    "torch_npu.profiler.tensorboard_trace_handler",
}
"""Names that SGLANG_FILES use of wheels that can be had."""

SWITCHES = {"torch_npu.npu.config.allow_internal_format"}
"""Names that an object's __setattr__ compares as texts."""

TAILS = {"TransferEngine", "register_memory", "transfer_sync_write", "unregister_memory"}
"""Texts of Mooncake's library that stand there only as the end of a longer one: a linker keeps one copy of such two."""

NEEDS_TORCH = {"mooncake.pg.MooncakeBackendOptions", "mooncake.pg.set_transfer_engine"}
"""Of a file for each release of torch, of which the wheel for NPUs has none. SGLang imports it for expert parallelism
over Mooncake only."""

NOT_TO_BE_HAD = {
    "sgl_kernel_npu.attention.sinks_attention.attention_sinks_prefill_triton",
    "sgl_kernel_npu.attention.sinks_attention.attention_sinks_triton",
    "sgl_kernel_npu.fla.fused_gdn_gating.fused_gdn_gating_kernel_without_sigmoid",
    "sgl_kernel_npu.fla.fused_gdn_gating.fused_gdn_gating_npu",
    "sgl_kernel_npu.fla.kda_gate.fused_kda_gate_npu",
    "sgl_kernel_npu.fla.kda_target_verify.kda_target_verify_npu",
    "sgl_kernel_npu.fla.l2norm.l2norm_fwd",
    "sgl_kernel_npu.fla.utils.prepare_chunk_indices",
    "sgl_kernel_npu.mamba.mamba_state_update_triton.conv_state_rollback",
    "sgl_kernel_npu.mamba.mamba_state_update_triton.move_intermediate_cache",
    "sgl_kernel_npu.mamba.mamba_state_update_triton.move_intermediate_cache_kda",
    "sgl_kernel_npu.mamba.speculative_state_scatter.speculative_state_scatter_npu",
    "sgl_kernel_npu.mem_cache.allocator.alloc_extend_kernel",
    "sgl_kernel_npu.mem_cache.kv_cache_store.store_kv_cache_prefix_valid_npu_triton",
}
"""sgl-kernel-npu is in no package registry: its wheels are built for one CANN and hang on its releases."""

OPERATORS_OF_OTHERS = {
    "torch_npu.causal_conv1d",
    "torch_npu.chunk_gated_delta_rule",
    "torch_npu.chunk_kda_fwd",
    "torch_npu.recurrent_gated_delta_rule",
}
"""torch.ops.npu.*, which other packages register in torch_npu's name space (sgl-kernel-npu, custom_ops)."""
