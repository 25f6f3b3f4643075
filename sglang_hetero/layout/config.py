"""From a checkpoint's configuration to the caches it needs, and to a digest that tells two configurations apart."""

from collections.abc import Mapping

from .config_fields import Fields
from .families import FAMILIES
from .geometry import ModelGeometry
from .manifest import digest

_MEANING = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "hidden_act",
    "mlp_hidden_act",
    "mamba_hidden_act",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "attn_output_gate",
    "mla_use_nope",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_expert_group",
    "topk_group",
    "topk_method",
    "norm_topk_prob",
    "moe_renormalize",
    "moe_router_activation_func",
    "routed_scaling_factor",
    "attention_out_multiplier",
    "ssm_out_multiplier",
    "mlp_multipliers",
    "embedding_multiplier",
    "attention_in_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_multipliers",
    "mamba_ssm_dtype",
    "attention_bias",
    "mlp_only_layers",
    "decoder_sparse_step",
    "use_sliding_window",
    "sliding_window",
    "first_k_dense_replace",
    "moe_layer_freq",
    "num_shared_experts",
    "n_shared_experts",
    "use_grouped_topk",
    "time_step_limit",
    "use_conv_bias",
    "residual_in_fp32",
    "mamba_norm_before_gate",
    "mamba_rms_norm",
    "mamba_conv_bias",
)
"""Fields that change what a cached number means without changing a shape. Left out: whatever SGLang rewrites for a TP
size (padded intermediate sizes) and how the weights are stored, which may differ between prefill and decode."""


def geometry_from_config(config: object) -> ModelGeometry:
    """The caches of a model.

    config: the mapping in a config.json or an object with its names as attributes; a nested `text_config` is honoured.
    Raises ManifestError that names the family and the field for an unknown family and for a field that is missing,
    no sensible number, or contradicts another.
    """
    fields = Fields(config)
    reader = FAMILIES.get(fields.family)
    if reader is None:
        raise fields.error(
            "is of a model family whose caches are not described",
            f"supported are {', '.join(sorted(FAMILIES))}",
        )
    geometry = reader(fields)
    if not geometry.attention_layers or (geometry.linear is not None and not geometry.linear_layers):
        kind = "attention" if not geometry.attention_layers else "linear-attention"
        raise fields.error(f"lists no {kind} layer, so this is no hybrid model")
    return geometry


def config_fingerprint(config: object) -> str:
    """Digest of what decides the meaning of the caches: architecture, geometry, and the fields behind the numbers.

    It is of the configuration alone: a model before and after fine-tuning has one fingerprint.
    The same for any order of keys, and free of paths, versions and storage formats. Compare digests of the same kind
    of config only: an object has defaults filled in that a config.json leaves out. Raises like geometry_from_config.
    """
    fields = Fields(config)
    try:
        return _fingerprint(config, fields)
    except RecursionError:
        raise fields.error("is nested too deeply", "a config.json is a few levels deep") from None


AUTO = "auto"
_SAME_AS = {"half": "float16", "float": "float32", "bf16": "bfloat16"}


def arithmetic_dtype(config: object, given: str = AUTO) -> str:
    """torch's name of the dtype that SGLang computes in with `--dtype given` (configs/model_config.py)."""
    if given != AUTO:
        return _SAME_AS.get(given, given)
    own = _plain(Fields(config).value("dtype", "torch_dtype", outer=True))
    # Of a checkpoint in float32, or that does not say, SGLang makes float16.
    return "float16" if own in (None, "float32", "float") else str(own)


def ssm_dtype(config: object) -> str:
    """torch's name of the dtype of SSM states of a checkpoint (configs/mamba_utils.py, mamba2_state_dtype)."""
    own = Fields(config).value("mamba_ssm_dtype", outer=True)
    # What is none of them SGLang ignores, with a warning.
    return own if isinstance(own, str) and own in _SSM_DTYPES else _SSM_DTYPES[0]


_SSM_DTYPES = ("float32", "bfloat16", "float16")
"""The first one where nothing is said."""


def hidden_size(config: object) -> int | None:
    """Elements of the hidden state behind a token, which is what an MTP module begins with; None if it is not told.

    Raises ManifestError for what is no size.
    """
    fields = Fields(config)
    return None if fields.value("hidden_size") is None else fields.count("hidden_size")


_KV_SCALES = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Fields of quantization_config: with these the checkpoint has scales for 8-bit keys and values, without them 1.0."""


def _fingerprint(config: object, fields: Fields) -> str:
    quantization = fields.value("quantization_config", outer=True)
    scales = {name: _plain(value) for name in _KV_SCALES if (value := Fields(quantization).value(name)) is not None}
    meaning = {name: _plain(value) for name in _MEANING if (value := fields.value(name)) is not None}
    dtype = _plain(fields.value("dtype", "torch_dtype", outer=True))  # transformers 5 renamed the field
    architecture = _plain(fields.value("architectures", outer=True))
    return digest((fields.family, architecture, dtype, geometry_from_config(config), meaning, scales))


def _plain(value: object) -> object:
    """The value in a form with one spelling: whole floats as integers, dtypes and whatever else by name."""
    if isinstance(value, Mapping):
        return {str(_plain(str(key))): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else repr(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # JSON may hold half of a surrogate pair
    return str(value).removeprefix("torch.")
