"""Stand-in for the CPU build of sgl_kernel, which is not on PyPI and needs AVX512 and AMX.

It is found only through `sglang_hetero_cpu.pth` (sglang_hetero/cpu/enable.py), whose entry comes last on sys.path, so
a real sgl_kernel always wins. It registers what SGLang 0.5.23 calls for Qwen3.5 and Qwen3-Next as
torch.ops.sgl_kernel.* and exports the rest as functions; docs/cpu.md lists both.

`convert_weight_packed` must stay undefined here: SGLang takes its presence as the sign of an AMX build
(srt/utils/common.py, `_is_intel_amx_backend_available`) and would then, on a CPU with AMX tiles, pack weights and call
AMX kernels that do not exist. Without it every CPU takes the path without AMX.
"""

import torch

from sglang_hetero.cpu.ops import attention, delta_rule, gates, norms
from sglang_hetero.cpu.ops.speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "IS_HETERO_CPU_REFERENCE",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0.0.0+sglang.hetero.cpu"

# How the plugin tells this package from a real one.
IS_HETERO_CPU_REFERENCE = True

_SCHEMAS = {
    "fused_rmsnorm_gated_cpu(Tensor input, Tensor weight, Tensor gate, float eps) -> Tensor": (
        norms.fused_rmsnorm_gated_cpu
    ),
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim)"
    " -> (Tensor, Tensor)": norms.fused_qk_gemma_rmsnorm_cpu,
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps,"
    " int head_dim, int num_heads) -> (Tensor, Tensor, Tensor)": norms.fused_qk_gemma_rmsnorm_with_gate_cpu,
    "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()": gates.fused_sigmoid_mul_cpu,
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": (
        gates.fused_gdn_gating_cpu
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk,"
    " int num_heads_v, int head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)": (
        gates.fused_qkvzba_split_reshape_cat_contiguous_cpu
    ),
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a,"
    " Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens,"
    " bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0, bool is_kda=False,"
    " bool disable_state_update=False, Tensor(b!)? intermediate_states_buffer=None,"
    " Tensor? intermediate_state_indices=None, int? cache_steps=None, Tensor? retrieve_parent_token=None)"
    " -> Tensor": delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale,"
    " Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn,"
    " int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()": attention.decode_attention_cpu,
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer,"
    " Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,"
    " bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal) -> ()": attention.extend_attention_cpu,
}

# The registrations live as long as this object.
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
for _schema, _function in _SCHEMAS.items():
    _LIBRARY.impl(_LIBRARY.define(_schema), _function, "CPU")
