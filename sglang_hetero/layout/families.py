"""The caches of each model family, read from a checkpoint's configuration: one function per family.

Which segments the convolution has, how they are cut, and which layers have what is decided by SGLang's models and by
its state shapes (sglang/srt/configs/mamba_utils.py); each function names its source. All raise ManifestError for a
field that is missing, no sensible number, or contradicts another.
"""

from collections.abc import Callable

from .axes import Segment, Sharding
from .checks import shorten
from .config_fields import Fields, Nested
from .geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry

MTP_LAYER = 0
"""Layer id of the draft's only cache: SGLang sizes the NEXTN pool for one attention layer, numbered 0, however often
the MTP module is applied (sglang/srt/mem_cache/kv_cache_configurator.py, `_build_hybrid_linear_kv_pool`)."""


def _gated_delta_net(fields: Fields) -> ModelGeometry:
    """Qwen3-Next and Qwen3.5 (sglang/srt/configs/qwen3_next.py, `mamba2_cache_params`).

    State: value heads x value channels x key channels.
    """
    layers = fields.layer_count()
    attention = _interval_layers(fields, layers)
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_width, value_width = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    _refuse_padding(fields, "linear_num_key_heads", "linear_num_key_heads_cpu")
    return ModelGeometry(
        attention=_head_attention(fields, fields.count("head_dim")),
        attention_layers=attention,
        linear=LinearAttention(
            conv_segments=(
                Segment("q", key_heads, key_width, Sharding.DIVIDED),
                Segment("k", key_heads, key_width, Sharding.DIVIDED),
                Segment("v", value_heads, value_width, Sharding.DIVIDED),
            ),
            conv_kernel=_kernel(fields, "linear_conv_kernel_dim"),
            ssm_heads=value_heads,
            ssm_rows=value_width,
            ssm_columns=key_width,
        ),
        linear_layers=_others(layers, attention),
        # Qwen3-Next's config.json says nothing of the MTP module in the checkpoint; SGLang takes it to be there
        # (sglang/srt/configs/model_config.py, `_config_draft_model`). Only an explicit 0 denies it.
        draft_layers=_draft_layers(fields, default=1),
    )


def _kimi_linear(fields: Fields) -> ModelGeometry:
    """Kimi-Linear: KDA layers beside latent attention (sglang/srt/configs/kimi_linear.py). Layers count from 1."""
    layers = fields.layer_count()
    linear = Nested(fields, "linear_attn_config")
    kda, full = linear.layer_numbers("kda_layers"), linear.layer_numbers("full_attn_layers")
    if kda is None:
        raise linear.error("has no kda_layers")
    every = frozenset(range(1, layers + 1))
    if not kda <= every:
        raise linear.error(f"names kda_layers {sorted(kda - every)}, layers go from 1 to {layers}")
    if full is not None and full != every - kda:
        raise linear.error(
            f"names full_attn_layers {sorted(full)}, but what kda_layers leaves of {layers} is {sorted(every - kda)}"
        )
    heads, width = linear.count("num_heads"), linear.count("head_dim")
    return ModelGeometry(
        attention=LatentAttention(fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")),
        attention_layers=tuple(number - 1 for number in sorted(every - kda)),
        linear=LinearAttention(
            conv_segments=tuple(Segment(name, heads, width, Sharding.DIVIDED) for name in "qkv"),
            conv_kernel=_kernel(linear, "short_conv_kernel_size"),
            ssm_heads=heads,
            ssm_rows=width,
            ssm_columns=width,
        ),
        linear_layers=tuple(number - 1 for number in sorted(kda)),
        draft_layers=_draft_layers(fields),
    )


_NEMOTRON_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(fields: Fields) -> ModelGeometry:
    """Nemotron-H: each block is Mamba-2, attention or feed-forward (sglang/srt/configs/nemotron_h.py).

    The number of layers is that of the blocks; num_hidden_layers is ignored there too.
    """
    blocks = _nemotron_blocks(fields, "layers_block_type", "hybrid_override_pattern")
    if blocks is None:
        raise fields.error("has no layers_block_type or hybrid_override_pattern")
    mtp = _nemotron_blocks(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    # The draft pool has one layer (see MTP_LAYER), so attention in another place of the MTP module has no cache, and
    # the state of a Mamba block there would not be transferred.
    plain_draft = mtp is None or (mtp[:1] == ("attention",) and "mamba" not in mtp and mtp.count("attention") == 1)
    return ModelGeometry(
        attention=_head_attention(fields, fields.count("head_dim", "attention_head_dim")),
        attention_layers=tuple(layer for layer, block in enumerate(blocks) if block == "attention"),
        linear=_mamba2(
            heads=fields.count("mamba_num_heads"),
            width=fields.count("mamba_head_dim"),
            groups=fields.count("n_groups"),
            state=fields.count("ssm_state_size"),
            kernel=_kernel(fields, "conv_kernel"),
        ),
        linear_layers=tuple(layer for layer, block in enumerate(blocks) if block == "mamba"),
        draft_layers=_draft_layers(fields) if plain_draft else (),
    )


def _nemotron_blocks(fields: Fields, list_name: str, pattern_name: str) -> tuple[str, ...] | None:
    """Kinds of block in order, from the list or from the older pattern of letters; None if neither is there."""
    listed, pattern = fields.strings(list_name), fields.value(pattern_name)
    if pattern is not None:
        unknown = set(pattern) - set(_NEMOTRON_BLOCKS) if isinstance(pattern, str) else {pattern_name}
        if unknown:
            raise fields.error(
                f"has {pattern_name} = {shorten(pattern)}, its letters must be {' '.join(_NEMOTRON_BLOCKS)}"
            )
        spelled = tuple(_NEMOTRON_BLOCKS[letter] for letter in str(pattern))
        if listed is not None and listed != spelled:
            raise fields.error(f"contradicts itself: {list_name} and {pattern_name} name different blocks")
        return spelled
    if listed is not None and not set(listed) <= set(_NEMOTRON_BLOCKS.values()):
        raise fields.error(f"has {list_name} = {list(listed)}, they must be {', '.join(_NEMOTRON_BLOCKS.values())}")
    return listed


def _falcon_h1(fields: Fields) -> ModelGeometry:
    """Falcon-H1: attention and Mamba-2 side by side in every layer (sglang/srt/configs/falcon_h1.py)."""
    layers = tuple(range(fields.layer_count()))
    heads = fields.count("mamba_n_heads")
    inner = fields.value("mamba_d_ssm")
    channels = (
        fields.count("mamba_expand") * fields.count("hidden_size") if inner is None else fields.count("mamba_d_ssm")
    )
    width = channels // heads if fields.value("mamba_d_head") in (None, "auto") else fields.count("mamba_d_head")
    if width * heads != channels:
        raise fields.error(f"gives mamba_n_heads = {heads} of {width} channels each, but {channels} channels in all")
    return ModelGeometry(
        attention=_head_attention(fields, _head_width(fields)),
        attention_layers=layers,
        linear=_mamba2(
            heads=heads,
            width=width,
            groups=fields.count("mamba_n_groups"),
            state=fields.count("mamba_d_state"),
            kernel=_kernel(fields, "mamba_d_conv"),
        ),
        linear_layers=layers,
    )


def _head_width(fields: Fields) -> int:
    if fields.value("head_dim") is not None:
        return fields.count("head_dim")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise fields.error(f"has no head_dim, and hidden_size = {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _grouped_query(fields: Fields) -> ModelGeometry:
    """Plain transformers, dense and with experts: the same attention in every layer and nothing else
    (sglang/srt/models/qwen3.py, qwen3_moe.py, qwen2.py, qwen2_moe.py, llama.py)."""
    layers = fields.layer_count()
    types = fields.strings("layer_types")
    if types is not None and types != ("full_attention",) * layers:
        raise fields.error(
            f"has layer_types {list(types)}, only full_attention in each of {layers} layers is described"
        )
    # Qwen3's default is a number of its own; in the other families it is what divides the hidden size.
    width = fields.count("head_dim") if fields.family.startswith("qwen3") else _head_width(fields)
    return ModelGeometry(
        attention=_head_attention(fields, width),
        attention_layers=tuple(range(layers)),
        linear=None,
        linear_layers=(),
    )


FAMILIES: dict[str, Callable[[Fields], ModelGeometry]] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "qwen3": _grouped_query,
    "qwen3_moe": _grouped_query,
    "qwen2": _grouped_query,
    "qwen2_moe": _grouped_query,
    "llama": _grouped_query,
}


def _mamba2(*, heads: int, width: int, groups: int, state: int, kernel: int) -> LinearAttention:
    """A Mamba-2 mixer: the convolution runs over x, B and C; the state is heads x head channels x state size.

    B and C belong to groups of heads. Several groups are cut like heads; a single one is kept by every rank
    (sglang/srt/layers/attention/mamba/mamba.py, which takes no TP size that does not divide several groups).
    """
    sharding = Sharding.DIVIDED if groups > 1 else Sharding.REPLICATED
    return LinearAttention(
        conv_segments=(
            Segment("x", heads, width, Sharding.DIVIDED),
            Segment("B", groups, state, sharding),
            Segment("C", groups, state, sharding),
        ),
        conv_kernel=kernel,
        ssm_heads=heads,
        ssm_rows=width,
        ssm_columns=state,
    )


def _head_attention(fields: Fields, width: int) -> HeadAttention:
    # Where it is absent, transformers and SGLang take different numbers; a guess here would be a third one.
    heads = fields.count("num_key_value_heads")
    _refuse_padding(fields, "num_key_value_heads", "original_total_num_kv_heads")
    # SGLang gives K and V of these models one width (HybridLinearKVPool takes no other).
    return HeadAttention(heads, width, width)


def _refuse_padding(fields: Fields, name: str, other: str) -> None:
    """Raise ManifestError where SGLang has padded heads to fit the TP size, as it does on a CPU only.

    The pool then has the shape of replicated heads, but rank r holds head r or zeros (sglang/srt/configs/
    update_config.py, `adjust_config_with_unaligned_cpu_tp`), which no peer could know.
    """
    value, unpadded = fields.value(name), fields.value(other)
    if value is not None and unpadded is not None and value != unpadded:
        raise fields.error(
            f"has {name} = {value}, but {other} = {unpadded}: SGLang has padded heads to fit the TP size",
            "choose a TP size that divides the model's heads",
        )


def _kernel(fields: Fields, name: str) -> int:
    kernel = fields.count(name)
    if kernel == 1:
        raise fields.error(f"has {name} = 1: such a convolution keeps nothing, so it has no cache")
    return kernel


def _interval_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Full-attention layers, by layer_types or full_attention_interval; SGLang goes by the interval alone."""
    types = fields.strings("layer_types")
    found = []
    if types is not None:
        if len(types) != layers or not set(types) <= {"full_attention", "linear_attention"}:
            raise fields.error(
                f"has layer_types {types}, it must give each of {layers} layers full_ or linear_attention"
            )
        found.append(tuple(layer for layer, kind in enumerate(types) if kind == "full_attention"))
    if fields.value("full_attention_interval") is not None:
        interval = fields.count("full_attention_interval")
        found.append(tuple(range(interval - 1, layers, interval)))
    if not found:
        raise fields.error("has no layer_types or full_attention_interval")
    if found[0] != found[-1]:
        raise fields.error("contradicts itself: layer_types and full_attention_interval name different layers")
    return found[0]


def _draft_layers(fields: Fields, default: int = 0) -> tuple[int, ...]:
    """The draft's layers: one if there is an MTP module. `default` stands for a configuration that says nothing."""
    depths = [fields.value(name, outer=True) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    for depth in depths:
        if depth is not None and (type(depth) is not int or depth < 0):
            raise fields.error(f"has {shorten(depth)} as its number of MTP layers, it must be a whole number from 0")
    depth = max((depth for depth in depths if isinstance(depth, int)), default=default)
    return (MTP_LAYER,) if depth else ()


def _others(layers: int, attention: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if layer not in attention)
