"""config.json of a checkpoint, as transformers and SGLang read it."""

from typing import Any

from sglang_hetero.models.specs import Family, ModelSpec

_ARCHITECTURES = {
    Family.QWEN3_5: "Qwen3_5ForCausalLM",
    Family.QWEN3_5_MOE: "Qwen3_5MoeForCausalLM",
    Family.QWEN3_NEXT: "Qwen3NextForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
ROPE_THETA = 1e7  # the base of Qwen3.5 and Qwen3-Next
PARTIAL_ROTARY = 0.25  # part of a head that is rotated, as in both families; Qwen3 rotates all of it


def model_config(spec: ModelSpec) -> dict[str, Any]:
    """The content of config.json; weights are bf16, the recurrent state is kept in fp32."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": str(spec.family),
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.attention_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": _layer_types(spec),
        "rope_parameters": _rope(spec),
        "bos_token_id": None,
        "eos_token_id": spec.eos_token,
        "pad_token_id": spec.pad_token,
        "use_cache": True,
    }
    if spec.family is not Family.QWEN3:
        config |= _hybrid(spec)
    if spec.family is Family.QWEN3_NEXT:
        # SGLang 0.5.23 reads the base here only (models/qwen3_next.py); transformers reads rope_parameters.
        config["rope_theta"] = ROPE_THETA
    if spec.intermediate_size is not None:
        config["intermediate_size"] = spec.intermediate_size
    if spec.experts is not None:
        config |= {
            "num_experts": spec.experts.count,
            "num_experts_per_tok": spec.experts.per_token,
            "moe_intermediate_size": spec.experts.intermediate_size,
            "shared_expert_intermediate_size": spec.experts.shared_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def generation_config(spec: ModelSpec) -> dict[str, Any]:
    """The content of generation_config.json."""
    return {"eos_token_id": spec.eos_token, "pad_token_id": spec.pad_token}


def _hybrid(spec: ModelSpec) -> dict[str, Any]:
    """What a hybrid model has and a plain transformer has not."""
    return {
        "attn_output_gate": True,
        "full_attention_interval": spec.full_attention_interval,
        "partial_rotary_factor": PARTIAL_ROTARY,
        "linear_conv_kernel_dim": spec.conv_kernel,
        "linear_key_head_dim": spec.linear_key_dim,
        "linear_value_head_dim": spec.linear_value_dim,
        "linear_num_key_heads": spec.linear_key_heads,
        "linear_num_value_heads": spec.linear_value_heads,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": spec.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "num_nextn_predict_layers": spec.mtp_layers,
    }


def _layer_types(spec: ModelSpec) -> list[str]:
    full = set(spec.full_attention_layers)
    return ["full_attention" if i in full else "linear_attention" for i in range(spec.num_layers)]


def _rope(spec: ModelSpec) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": ROPE_THETA}
    if spec.family is Family.QWEN3:
        return rope
    rope["partial_rotary_factor"] = PARTIAL_ROTARY
    if spec.family is not Family.QWEN3_NEXT:
        # Qwen3.5 rotates with three interleaved position axes; for text all three are equal. The sections
        # share out the rotary frequencies (half the rotated width), rounded in favour of the first.
        frequencies = int(spec.head_dim * PARTIAL_ROTARY) // 2
        third = frequencies // 3
        rest = frequencies - third
        rope |= {"mrope_interleaved": True, "mrope_section": [rest - rest // 2, rest // 2, third]}
    return rope
