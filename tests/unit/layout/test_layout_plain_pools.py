"""A model without linear layers: SGLang gives it a plain pool instead of a HybridLinearKVPool, and no linear state."""

from typing import Any

import pytest
import torch
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from transformers import LlamaConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from sglang_hetero import models
from sglang_hetero.errors import ManifestError
from sglang_hetero.layout import Manifest, Role, Segment
from sglang_hetero.layout.config import config_fingerprint, geometry_from_config
from sglang_hetero.layout.geometry import HeadAttention, ModelGeometry
from sglang_hetero.layout.wire import decode, encode
from sglang_hetero.models.config import model_config
from tests.unit.layout.described import assert_read_back, describe_pools
from tests.unit.layout.live_pools import PAGE, PAGES, PLATFORMS, Pools, coordinates, platform, write

GQA = ModelGeometry(HeadAttention(4, 6, 6), attention_layers=(0, 1, 2), linear=None, linear_layers=())
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
}


def plain_pool(name: str, tp: int, layers: range = range(3), page_size: int = PAGE) -> Any:
    """The target's pool as mem_cache/kv_cache_configurator.py makes it (`_build_mha_kv_pool`, on an NPU its own)."""
    with platform(name):
        cls = NPUMHATokenToKVPool if name.startswith("npu") else MHATokenToKVPool
        return cls(
            PAGES * page_size,
            page_size=page_size,
            dtype=torch.bfloat16,
            head_num=max(1, 4 // tp),
            head_dim=6,
            layer_num=len(layers),
            device="cpu",
            enable_memory_saver=False,
            start_layer=layers.start,
            end_layer=layers.stop,
        )


def described(pool: Any, name: str, tp: int = 1, rank: int = 0, **changes: Any) -> Manifest:
    return describe_pools(Pools(pool, None, None, name, kda=False), GQA, tp, rank, **changes)


def fill(pool: Any, layers: range = range(3)) -> dict[tuple[Role, int], tuple[int, ...]]:
    """Write every layer through the pool's own accessors; the shapes [page, token, head, channel]."""
    written = {}
    for layer in layers:
        for role, view in (
            (Role.TARGET_KEY, pool.get_key_buffer(layer)),
            (Role.TARGET_VALUE, pool.get_value_buffer(layer)),
        ):
            paged = view.view(-1, pool.page_size, *view.shape[-2:])
            write(paged, role, layer, (0, 1, 2, 3), tuple(paged.shape))
            written[role, layer] = tuple(paged.shape)
    return written


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PLATFORMS)
def test_reads_back_what_the_pool_was_given(name: str, tp: int) -> None:
    """At TP 8 each of the 4 heads is on two ranks."""
    pool = plain_pool(name, tp)
    written = fill(pool)
    for rank in range(tp):
        manifest = described(pool, name, tp, rank)
        assert_read_back(manifest, written)
        assert manifest.roles == {Role.TARGET_KEY, Role.TARGET_VALUE}
        assert manifest.of(Role.TARGET_KEY)[0].cut_axis.segments == (Segment("kv", 4, 1),)
        assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize("name", ["cuda", "npu", "npu-fia"])
def test_pages_of_one_token(name: str) -> None:
    pool = plain_pool(name, 2, page_size=1)
    written = fill(pool)
    assert_read_back(described(pool, name, 2, 1), written)


@pytest.mark.parametrize("name", PLATFORMS)
def test_nothing_that_sglang_transfers_is_left_out(name: str) -> None:
    pool = plain_pool(name, 2)
    ours = {
        (address, part.items * part.item_stride, part.item_span)
        for part in described(pool, name, 2).components
        for address in part.addresses
    }
    assert ours == set(zip(*pool.get_contiguous_buf_infos(), strict=True))


def test_stage_of_a_pipeline_has_the_models_layer_ids() -> None:
    pool = plain_pool("cuda", 1, range(1, 3))
    manifest = described(pool, "cuda", coordinates=coordinates(1, 0, pp_rank=1, pp_size=2))
    assert {part.layers for part in manifest.components} == {(1, 2)}
    assert_read_back(manifest, fill(pool, range(1, 3)))


def test_a_pool_of_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ManifestError, match=r"attention layers: the pools hold 0, 1, expected 0, 1, 2"):
        described(plain_pool("cuda", 1, range(2)), "cuda")


def test_a_draft_of_its_own_is_refused() -> None:
    pools = Pools(plain_pool("cuda", 1), plain_pool("cuda", 1, range(1)), None, "cuda", kda=False)
    with pytest.raises(ManifestError, match=r"draft layers: the pool holds 0, expected .*; only the MTP module"):
        describe_pools(pools, GQA)


@pytest.mark.parametrize(
    "cls", [Qwen3Config, Qwen3MoeConfig, Qwen2Config, Qwen2MoeConfig, LlamaConfig], ids=lambda cls: cls.model_type
)
def test_geometry_from_a_configuration(cls: Any) -> None:
    """From config.json and from the object that SGLang has: transformers' own, with defaults filled in."""
    mapping = {**CONFIG, "model_type": cls.model_type}
    assert geometry_from_config(mapping) == geometry_from_config(cls(**CONFIG)) == GQA
    assert config_fingerprint(cls(**CONFIG)) == config_fingerprint(cls(**CONFIG))
    assert config_fingerprint(mapping) != config_fingerprint({**mapping, "head_dim": 8})


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_head_width_from_the_hidden_size(family: str) -> None:
    """Older configurations have no head_dim; Qwen3's default is another number, so there it must be said."""
    config = {**CONFIG, "head_dim": None, "hidden_size": 48}
    assert geometry_from_config({**config, "model_type": family}) == GQA
    with pytest.raises(ManifestError, match="has no head_dim"):
        geometry_from_config({**config, "model_type": "qwen3"})


def test_the_projects_own_model() -> None:
    spec = models.spec("tiny-gqa")
    geometry = geometry_from_config(model_config(spec))
    assert geometry.attention == HeadAttention(spec.kv_heads, spec.head_dim, spec.head_dim)
    assert geometry.attention_layers == tuple(range(spec.num_layers))
    assert (geometry.linear, geometry.linear_layers, geometry.draft_layers) == (None, (), ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "only full_attention in each of 3",
        ),
        ({"layer_types": ["full_attention"]}, "only full_attention in each of 3 layers"),
        ({"num_key_value_heads": None}, "has no num_key_value_heads"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"original_total_num_kv_heads": 2}, "padded heads"),
    ],
    ids=["sliding", "too-few-types", "kv-heads", "head-dim", "padded"],
)
def test_rejects_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        geometry_from_config({**CONFIG, "model_type": "qwen3", **changes})
