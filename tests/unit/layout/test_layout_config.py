"""Geometry from configurations: what SGLang's own config classes say, and refusals of what makes no sense."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sglang.srt.configs import FalconH1Config, KimiLinearConfig, NemotronHConfig, Qwen3_5Config, Qwen3NextConfig
from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig

from sglang_hetero import models
from sglang_hetero.errors import ManifestError
from sglang_hetero.layout import Segment, Sharding, Side
from sglang_hetero.layout.config import config_fingerprint, geometry_from_config
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.pools import describe
from tests.unit.layout.described import divided
from tests.unit.layout.live_pools import SLOTS, coordinates, kv_pool, mamba_pool, platform

TP_SIZES = (1, 2, 4)
Config = dict[str, Any]

GDN: Config = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **GDN}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, **GDN},
    "vision_config": {"num_hidden_layers": 2},
}
KIMI: Config = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 6,
        "short_conv_kernel_size": 4,
    },
}
NEMOTRON: Config = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M*E*M",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 3,
    "n_groups": 4,
    "ssm_state_size": 5,
    "conv_kernel": 4,
}
FALCON: Config = {
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 24,
    "mamba_n_heads": 8,
    "mamba_d_head": 3,
    "mamba_n_groups": 1,
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
}
FAMILIES: dict[str, tuple[Config, Callable[..., Any]]] = {
    "qwen3_next": (QWEN3_NEXT, Qwen3NextConfig),
    "qwen3_5": (QWEN3_5, Qwen3_5Config),
    "kimi_linear": (KIMI, KimiLinearConfig),
    "nemotron_h": (NEMOTRON, NemotronHConfig),
    "falcon_h1": (FALCON, FalconH1Config),
}


def _object(config: Config, cls: Callable[..., Any]) -> Any:
    return cls(**json.loads(json.dumps({key: value for key, value in config.items() if key != "model_type"})))


def _cache_params(config: Any, tp: int) -> Any:
    """SGLang's own description of one rank's state."""
    parallel = SimpleNamespace(attn_tp_size=tp)
    module = "sglang.srt.configs."
    with (
        patch(module + "qwen3_next.linear_attn_tp_size", lambda: tp),
        patch(module + "kimi_linear.get_parallel", lambda: parallel),
        patch(module + "nemotron_h.get_parallel", lambda: parallel),
        patch(module + "falcon_h1.get_parallel", lambda: parallel),
    ):
        return getattr(config, "text_config", config).mamba2_cache_params


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mapping_and_sglangs_object_agree(family: str) -> None:
    config, cls = FAMILIES[family]
    geometry, instance = geometry_from_config(config), _object(config, cls)
    assert geometry_from_config(instance) == geometry
    text = getattr(instance, "text_config", instance)
    assert geometry.attention_layers == tuple(text.full_attention_layer_ids)
    assert geometry.linear_layers == tuple(_cache_params(instance, 1).layers)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fits_the_pools_that_sglang_sizes(family: str, tp: int) -> None:
    """The pools of SGLang's own shapes for that config and TP size are described without complaint, on all ranks."""
    config, cls = FAMILIES[family]
    model, params = geometry_from_config(config), _cache_params(_object(config, cls), tp)
    with platform("cuda"):
        mamba = mamba_pool(params, model.linear_layers)
        target = kv_pool(model, model.attention_layers, tp, mamba, "cuda")
        draft = kv_pool(model, model.draft_layers, tp, mamba, "cuda") if model.draft_layers else None
    for rank in range(tp):
        manifest = describe(
            side=Side.DECODE,
            host="test",
            coordinates=coordinates(tp, rank),
            model=model,
            fingerprint=config_fingerprint(config),
            incarnation="first",
            sglang="0.5.23",
            target_pool=target,
            draft_pool=draft,
        )
        assert {layer for part in manifest.components for layer in part.layers if not part.role.draft} == {
            *model.attention_layers,
            *model.linear_layers,
        }
        assert manifest.components[-1].items >= SLOTS


@pytest.mark.parametrize("name", ["tiny", "tiny-gqa2", "tiny-h6", "tiny-moe", "tiny-next"])
def test_the_projects_own_models(name: str) -> None:
    spec = models.spec(name)
    geometry = geometry_from_config(json.loads((models.path(name) / "config.json").read_text()))
    assert geometry.attention_layers == tuple(spec.full_attention_layers)
    assert geometry.attention == HeadAttention(spec.kv_heads, spec.head_dim, spec.head_dim)
    assert geometry.draft_layers == (0,)


def test_gated_delta_net() -> None:
    expected = ModelGeometry(
        attention=HeadAttention(2, 16, 16),
        attention_layers=(3, 7),
        linear=LinearAttention(
            conv_segments=(divided("q", 4, 3), divided("k", 4, 3), divided("v", 8, 5)),
            conv_kernel=4,
            ssm_heads=8,
            ssm_rows=5,
            ssm_columns=3,
        ),
        linear_layers=(0, 1, 2, 4, 5, 6),
        draft_layers=(0,),
    )
    assert geometry_from_config(QWEN3_NEXT) == geometry_from_config(QWEN3_5) == expected
    for model_type in ("qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"):
        assert geometry_from_config({**GDN, "model_type": model_type}) == expected


def test_layer_types_instead_of_an_interval() -> None:
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(8)]
    config = {**QWEN3_NEXT, "layer_types": types}
    assert geometry_from_config(config) == geometry_from_config(QWEN3_NEXT)
    del config["full_attention_interval"]
    assert geometry_from_config(config) == geometry_from_config(QWEN3_NEXT)


def test_kimi_counts_layers_from_one() -> None:
    geometry = geometry_from_config(KIMI)
    assert (geometry.attention_layers, geometry.linear_layers) == ((3,), (0, 1, 2, 4))
    assert geometry.attention == LatentAttention(32, 16)
    assert geometry.linear == LinearAttention(tuple(divided(name, 4, 6) for name in "qkv"), 4, 4, 6, 6)
    assert geometry.draft_layers == ()
    assert geometry_from_config({**KIMI, "num_nextn_predict_layers": 1}).draft_layers == (0,)
    nested = {"model_type": "kimi_vl", "architectures": ["KimiVL"], "text_config": KIMI}
    assert geometry_from_config(nested) == geometry


@pytest.mark.parametrize(("groups", "sharding"), [(4, Sharding.DIVIDED), (1, Sharding.REPLICATED)])
def test_mamba2_groups(groups: int, sharding: Sharding) -> None:
    geometry = geometry_from_config({**NEMOTRON, "n_groups": groups})
    assert geometry.linear == LinearAttention(
        conv_segments=(
            divided("x", 8, 3),
            Segment("B", groups, 5, sharding),
            Segment("C", groups, 5, sharding),
        ),
        conv_kernel=4,
        ssm_heads=8,
        ssm_rows=3,
        ssm_columns=5,
    )
    assert (geometry.attention_layers, geometry.linear_layers) == ((3, 5), (0, 2, 6))


def test_nemotron_blocks_by_name() -> None:
    blocks = ["mamba", "mlp", "mamba", "attention", "moe", "attention", "mamba"]
    assert geometry_from_config({**NEMOTRON, "layers_block_type": blocks}) == geometry_from_config(NEMOTRON)
    named = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    assert geometry_from_config({**named, "layers_block_type": blocks}) == geometry_from_config(NEMOTRON)


@pytest.mark.parametrize(
    ("mtp", "layers"),
    [("*E", (0,)), (None, (0,)), ("E*", ()), ("*M", ()), ("**", ())],
    ids=["*E", "-", "E*", "*M", "**"],
)
def test_nemotron_mtp_module(mtp: str | None, layers: tuple[int, ...]) -> None:
    """Only attention in the first place has the cache that SGLang's draft pool has."""
    config = {**NEMOTRON, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": mtp}
    assert geometry_from_config(config).draft_layers == layers


def test_falcon_has_both_in_every_layer() -> None:
    geometry = geometry_from_config(FALCON)
    assert geometry.attention_layers == geometry.linear_layers == (0, 1, 2)
    assert geometry.attention == HeadAttention(2, 8, 8)  # hidden_size over attention heads
    assert geometry_from_config({**FALCON, "head_dim": 16}).attention == HeadAttention(2, 16, 16)
    assert geometry_from_config({**FALCON, "mamba_d_head": "auto"}) == geometry
    wide = geometry_from_config({**FALCON, "mamba_d_ssm": None, "mamba_expand": 2, "mamba_d_head": "auto"})
    assert wide.linear is not None
    assert wide.linear.ssm_rows == 16


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0,)),  # Qwen3-Next's config.json is silent about its MTP module
        ({"num_nextn_predict_layers": 0}, ()),
        ({"num_nextn_predict_layers": 1}, (0,)),
        ({"mtp_num_hidden_layers": 3}, (0,)),
        ({"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 1}, (0,)),
    ],
)
def test_draft_layers(fields: Config, layers: tuple[int, ...]) -> None:
    assert geometry_from_config({**QWEN3_NEXT, **fields}).draft_layers == layers


_REJECTED: list[tuple[str, Config, dict[str, Any], str]] = [
    ("unknown-family", QWEN3_NEXT, {"model_type": "gpt2"}, "gpt2: the model's configuration is of a model family"),
    ("no-family", QWEN3_NEXT, {"model_type": None}, "model without model_type"),
    ("missing", QWEN3_NEXT, {"linear_num_key_heads": None}, "qwen3_next: .* has no linear_num_key_heads; use the"),
    ("kv-heads", QWEN3_NEXT, {"num_key_value_heads": None}, "has no num_key_value_heads; use the"),
    ("zero", QWEN3_NEXT, {"linear_value_head_dim": 0}, "linear_value_head_dim = 0, it must be a whole number"),
    ("negative", QWEN3_NEXT, {"head_dim": -1}, "head_dim = -1"),
    ("bool", QWEN3_NEXT, {"head_dim": True}, "head_dim = True"),
    ("text", QWEN3_NEXT, {"head_dim": "16"}, "head_dim = '16'"),
    ("fraction", QWEN3_NEXT, {"head_dim": 16.0}, "head_dim = 16.0"),
    ("huge", QWEN3_NEXT, {"head_dim": 1 << 60}, "head_dim = 1152921504606846976"),
    ("too-many-layers", QWEN3_NEXT, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, at most 4096"),
    ("no-window", QWEN3_NEXT, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1: such a convolution keeps"),
    ("no-layers", QWEN3_NEXT, {"full_attention_interval": None}, "no layer_types or full_attention_interval"),
    ("types-too-short", QWEN3_NEXT, {"layer_types": ["full_attention"]}, "must give each of 8 layers"),
    ("types-no-list", QWEN3_NEXT, {"layer_types": 3}, "layer_types = 3, it must be a list of names"),
    ("types-too-long", QWEN3_NEXT, {"layer_types": ["full_attention"] * 5000}, "5000 entries in layer_types"),
    (
        "types-against-interval",
        QWEN3_NEXT,
        {"layer_types": ["full_attention"] + ["linear_attention"] * 7},
        "layer_types and full_attention_interval name different layers",
    ),
    ("no-attention", QWEN3_NEXT, {"full_attention_interval": 9}, "lists no attention layer"),
    ("no-linear", QWEN3_NEXT, {"full_attention_interval": 1}, "lists no linear-attention layer"),
    ("draft-depth", QWEN3_NEXT, {"num_nextn_predict_layers": "1"}, "'1' as its number of MTP layers"),
    (
        "padded-on-cpu",
        QWEN3_NEXT,
        {"num_key_value_heads": 4, "original_total_num_kv_heads": 2},
        "padded heads to fit the TP size; choose a TP size that divides",
    ),
    ("padded-linear", QWEN3_NEXT, {"linear_num_key_heads_cpu": 8}, "linear_num_key_heads = 4, but .*_cpu = 8"),
    ("no-latent", KIMI, {"kv_lora_rank": None}, "kimi_linear: .* has no kv_lora_rank"),
    ("no-linear-config", KIMI, {"linear_attn_config": None}, "has no linear_attn_config"),
    ("n-groups", NEMOTRON, {"n_groups": None}, "nemotron_h: .* has no n_groups"),
    ("pattern-letter", NEMOTRON, {"hybrid_override_pattern": "MX"}, "its letters must be"),
    ("pattern-no-text", NEMOTRON, {"hybrid_override_pattern": 7}, "its letters must be"),
    ("no-pattern", NEMOTRON, {"hybrid_override_pattern": None}, "no layers_block_type or hybrid_override_pattern"),
    ("pattern-against-blocks", NEMOTRON, {"layers_block_type": ["mamba"]}, "name different blocks"),
    (
        "block-name",
        NEMOTRON,
        {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "magic"]},
        "layers_block_type = .*magic",
    ),
    ("falcon-channels", FALCON, {"mamba_d_head": 4}, "8 of 4 channels each, but 24 channels in all"),
    ("falcon-heads", FALCON, {"num_attention_heads": 7}, "hidden_size = 64 is no multiple of 7 heads"),
]


@pytest.mark.parametrize(
    ("config", "changes", "message"), [case[1:] for case in _REJECTED], ids=[case[0] for case in _REJECTED]
)
def test_rejects(config: Config, changes: Config, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        geometry_from_config({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_layers": None}, "linear_attn_config in the model's configuration has no kda_layers"),
        ({"kda_layers": [0, 1]}, r"names kda_layers \[0\], layers go from 1 to 5"),
        ({"kda_layers": "1"}, "kda_layers = '1', it must be a list of layer numbers"),
        ({"full_attn_layers": [5]}, r"full_attn_layers \[5\], but what kda_layers leaves of 5 is \[4\]"),
        ({"head_dim": 0}, "linear_attn_config .* head_dim = 0"),
        ({"short_conv_kernel_size": None}, "has no short_conv_kernel_size"),
    ],
)
def test_rejects_linear_attn_config(changes: Config, message: str) -> None:
    config = {**KIMI, "linear_attn_config": {**KIMI["linear_attn_config"], **changes}}
    with pytest.raises(ManifestError, match=message):
        geometry_from_config(config)


def test_rejects_sglangs_object_after_padding() -> None:
    """SGLang rewrites its object when it pads heads on a CPU."""
    config = _object(QWEN3_NEXT, Qwen3NextConfig)
    config.original_total_num_kv_heads, config.num_key_value_heads = 2, 4
    with pytest.raises(ManifestError, match="padded heads"):
        geometry_from_config(config)


def _reordered(value: Any) -> Any:
    return {key: _reordered(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_ignores_what_does_not_matter(family: str) -> None:
    config = FAMILIES[family][0] | {"rope_theta": 10000000, "torch_dtype": "bfloat16"}
    expected = config_fingerprint(config)
    for same in (
        _reordered(config),
        config | {"transformers_version": "5.0", "_name_or_path": "/somewhere", "use_cache": False},
        config | {"quantization_config": {"bits": 8}, "moe_intermediate_size": 96, "eos_token_id": 3},
        config | {"rope_theta": 1e7},
        {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": torch.bfloat16},
    ):
        assert config_fingerprint(same) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Another"]},
        {"dtype": "float16"},
        {"rope_theta": 5e6},
        {"rope_scaling": {"type": "yarn", "factor": 2}},
        {"rms_norm_eps": 1e-5},
        {"hidden_size": 128},
        {"num_key_value_heads": 4},
        {"linear_conv_kernel_dim": 3},
        {"full_attention_interval": 2},
        {"partial_rotary_factor": 0.5},
        {"num_nextn_predict_layers": 0},
        {"attention_bias": True},
        {"norm_topk_prob": False},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_fingerprint_tells_models_apart(changes: Config) -> None:
    assert config_fingerprint(QWEN3_NEXT | changes) != config_fingerprint(QWEN3_NEXT)


def test_fingerprint_of_sglangs_object_is_that_of_its_copy() -> None:
    first, second = (_object(QWEN3_NEXT, Qwen3NextConfig) for _ in range(2))
    second.name_or_path = "/elsewhere"
    assert config_fingerprint(first) == config_fingerprint(second)
    assert config_fingerprint(_object(GDN, Qwen3_5TextConfig)) != config_fingerprint(first)
