"""What `describe` refuses. Each pool is right but for one thing."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.ple_state_pool import ShortConvPool

from sglang_hetero.errors import ManifestError, TopologyError
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, ModelGeometry
from sglang_hetero.layout.state_pools import window_axis_of
from tests.unit.layout.described import GDN, KIMI, assert_read_back, describe_pools, divided
from tests.unit.layout.live_pools import (
    PAGE,
    PAGES,
    SLOTS,
    Pools,
    build,
    cache_params,
    coordinates,
    fill,
    kv_pool,
    mamba_pool,
    platform,
)


def _rejects(pools: Pools, model: ModelGeometry, *parts: str, **changes: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        describe_pools(pools, model, **changes)
    message = str(caught.value)
    assert message.startswith("prefill TP0/")
    for part in parts:
        assert part in message


@contextmanager
def _subclass(pool: Any, name: str) -> Iterator[None]:
    """The pool as an instance of a subclass of that name."""
    own = type(pool)
    pool.__class__ = type(name, (own,), {})
    try:
        yield
    finally:
        pool.__class__ = own


def _model(**changes: Any) -> ModelGeometry:
    return dataclasses.replace(GDN, **changes)


def _linear(**changes: Any) -> ModelGeometry:
    return _model(linear=dataclasses.replace(GDN.linear, **changes))


@pytest.fixture(scope="module")
def plain() -> Pools:
    return build(GDN, 1)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (_model(attention=HeadAttention(4, 6, 6)), ("target_key of layer 1", "[16, 2, 6]", "[any, 4, 6]")),
        (_model(attention=HeadAttention(2, 6, 8)), ("target_value of layer 1", "[16, 2, 6]", "[any, 2, 8]")),
        (_model(attention=LatentAttention(4, 2)), ("LatentAttention", "HeadAttention", "MHATokenToKVPool")),
        (_linear(ssm_heads=16), ("ssm", "[3, 3, 8, 2, 3]", "[3, 3, 16, 2, 3]")),
        (_linear(ssm_rows=4), ("ssm", "[3, 3, 8, 4, 3]")),
        (_linear(ssm_columns=2), ("ssm", "[3, 3, 8, 2, 2]")),
        (_linear(conv_kernel=5), ("conv: found slots of [40, 3]", "[channel, window] = [40, 4]", "[4 or more, 40]")),
        (_linear(conv_segments=(divided("q", 8, 5),)), ("conv: found segments of [12, 12, 16]", "expected [40]")),
        (_model(attention_layers=(1,)), ("attention layers: the pools hold 1, 3, expected 1",)),
        (_model(linear_layers=(0, 2)), ("linear-attention layers: the pools hold 0, 2, 4, expected 0, 2",)),
        (_model(linear=None, linear_layers=()), ("linear-attention layers: the pools hold 0, 2, 4, expected none",)),
        (_model(draft_layers=()), ("draft layers: the pool holds 0, expected none", "NEXTN")),
    ],
    ids=lambda value: value[0].replace(" ", "-")[:40] if isinstance(value, tuple) else None,
)
def test_rejects_another_model(plain: Pools, model: ModelGeometry, parts: tuple[str, ...]) -> None:
    _rejects(plain, model, *parts)


def test_rejects_another_tp_size(plain: Pools) -> None:
    _rejects(plain, GDN, "found shape [16, 2, 6]", "expected [any, 1, 6]", coordinates=coordinates(2, 0))


def test_rejects_heads_that_cannot_be_sharded(plain: Pools) -> None:
    model = _model(attention=HeadAttention(6, 6, 6))
    with pytest.raises(TopologyError, match="6 heads cannot be sharded over TP 4"):
        describe_pools(plain, model, 4)


def test_rejects_a_target_with_all_heads_on_every_rank() -> None:
    """Only a draft may have them; a target that does is no target of this TP size."""
    pools = build(GDN, 2)
    pools.target.full_kv_pool = build(GDN, 1).target.full_kv_pool
    _rejects(pools, GDN, "target_key of layer 1", "[16, 2, 6]", "[any, 1, 6]", coordinates=coordinates(2, 0))


def test_rejects_a_draft_with_some_of_the_heads() -> None:
    """Neither its share of the model's heads nor all of them; nor all keys and a share of the values."""
    four, eight = (_model(attention=HeadAttention(heads, 6, 6)) for heads in (4, 8))
    pools = build(eight, 4, draft=four, draft_tp=1)
    _rejects(pools, eight, "draft_key of layer 0", "[16, 4, 6]", "[any, 2, 6]", coordinates=coordinates(4, 0))
    pools = build(eight, 4, draft_tp=1)
    pools.draft.full_kv_pool.v_buffer = build(eight, 4).draft.full_kv_pool.v_buffer
    _rejects(pools, eight, "draft_value of layer 0", "[16, 2, 6]", "[any, 8, 6]", coordinates=coordinates(4, 0))


@pytest.mark.parametrize(("heads", "tp", "padded"), [(3, 3, 9), (2, 3, 6)])
def test_rejects_padded_heads_that_look_like_a_whole_draft(heads: int, tp: int, padded: int) -> None:
    """On a CPU SGLang pads heads to a multiple of TP: a rank may then have as many as the model, some of them zeros.

    Only with config.json, which says nothing of it; SGLang's own object is refused before (layout/families.py).
    """
    linear = {"conv_segments": tuple(divided(name, 6, 3) for name in "qkv"), "ssm_heads": 6, "ssm_rows": 3}
    model = dataclasses.replace(_linear(**linear), attention=HeadAttention(heads, 6, 6))
    pools = build(dataclasses.replace(model, attention=HeadAttention(padded, 6, 6)), tp)
    assert padded // tp == heads
    with pytest.raises((ManifestError, TopologyError), match=r"target_key of layer 1|cannot be sharded over TP 3"):
        describe_pools(pools, model, tp)


def test_rejects_linear_heads_fewer_than_ranks() -> None:
    """On a CPU SGLang pads them: the shapes are those of replicated heads, the content is not."""
    model = _linear(conv_segments=tuple(divided(name, 2, 3) for name in "qkv"), ssm_heads=2, ssm_rows=3)
    pools = build(_linear(conv_segments=tuple(divided(name, 4, 3) for name in "qkv"), ssm_heads=4, ssm_rows=3), 4)
    pools.mamba.conv_shard_groups = None
    with pytest.raises(TopologyError, match="segment q: 2 heads cannot be divided among TP 4"):
        describe_pools(pools, model, 4)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("MHATokenToKVPoolFP4", ("block scales",)),
        ("MHATokenToKVPoolMXFP8", ("block scales",)),
        ("DSATokenToKVPool", ("index cache",)),
        ("UnifiedMHATokenToKVPool", ("--enable-unified-memory",)),
        ("PageMajorMHATokenToKVPool", ("interleaves",)),
        ("BrandNewPool", ("BrandNewPool: is a pool that is not known", "supported are MHATokenToKVPool")),
    ],
)
def test_rejects_other_pools(plain: Pools, name: str, parts: tuple[str, ...]) -> None:
    """Also as a subclass of one that is supported."""
    with _subclass(plain.target.full_kv_pool, name):
        _rejects(plain, GDN, name, *parts)


def test_rejects_a_hybrid_pool_with_more_in_it(plain: Pools) -> None:
    with _subclass(plain.target, "QSATokenToKVPool"):
        _rejects(plain, GDN, "QSATokenToKVPool: keeps an index cache")


def test_page_major_pool_cannot_be_built() -> None:
    """If this fails, SGLang has page-major pools again: describe them."""
    with platform("cuda"), pytest.raises(NotImplementedError):
        kv_pool(GDN, (1,), 1, None, "cuda", full_kv_pool_class=memory_pool.PageMajorMHATokenToKVPool)


@pytest.mark.parametrize(
    ("attribute", "content", "part"),
    [
        ("k_scale_buffer", [], "k_scale_buffer holds scales"),
        ("kv_scale_buffer", [], "kv_scale_buffer holds scales"),
        ("index_k_buffer", [], "index_k_buffer holds an index cache"),
        ("kv_cache_layout", "hnd", "the layout 'hnd' is not described"),
        ("kv_cache_layout", "vectorized_5d", "the layout 'vectorized_5d' is not described"),
        ("quant_method", object(), "quantised with scales"),
        ("use_dsa", True, "sparse attention"),
        ("layer_shard_enabled", True, "dealt out over ranks"),
        ("dcp_size", 2, "use --dcp-size 1"),
    ],
)
def test_rejects_what_a_known_pool_may_hold_besides(plain: Pools, attribute: str, content: Any, part: str) -> None:
    with patch.object(plain.target.full_kv_pool, attribute, content, create=True):
        _rejects(plain, GDN, part)


def test_rejects_a_quantised_pool() -> None:
    with platform("cuda"):
        inner = memory_pool.MHATokenToKVPoolFP4(
            size=8, page_size=4, dtype=torch.uint8, head_num=2, head_dim=16, layer_num=2, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        mamba = mamba_pool(cache_params(GDN.linear, GDN.linear_layers, 1, kda=False), GDN.linear_layers)
        pools = Pools(kv_pool(GDN, (1, 3), 1, mamba, "cuda", full_kv_pool=inner), None, mamba, "cuda", False)
    _rejects(pools, GDN, "MHATokenToKVPoolFP4: keeps block scales")


def test_rejects_an_index_cache_on_npu() -> None:
    pools = build(KIMI, 1, "npu", kda=True)
    with patch.object(pools.target.full_kv_pool, "index_k_buffer", torch.zeros(1)):
        _rejects(pools, KIMI, "index_k_buffer holds an index cache")


def test_rejects_latent_pool_without_memory() -> None:
    pools = build(KIMI, 1, "npu", kda=True)
    with patch.object(pools.target.full_kv_pool, "k_buffer", None):
        _rejects(pools, KIMI, "no cache on the device")


def test_rejects_rows_that_are_no_whole_pages() -> None:
    with platform("cuda"):
        mamba = mamba_pool(cache_params(GDN.linear, GDN.linear_layers, 1, kda=False), GDN.linear_layers)
        target = kv_pool(GDN, GDN.attention_layers, 1, mamba, "cuda", size=PAGES * PAGE + 1)
    _rejects(Pools(target, None, mamba, "cuda", False), GDN, "17 token rows", "whole number of pages of 4")


@pytest.mark.parametrize("name", ["npu", "npu-fia"])
def test_an_npu_pool_rounds_its_size_to_pages(name: str) -> None:
    """On an NPU it allocates pages, however it then shows them."""
    with platform(name):
        mamba = mamba_pool(cache_params(GDN.linear, GDN.linear_layers, 1, kda=False), GDN.linear_layers)
        target = kv_pool(GDN, GDN.attention_layers, 1, mamba, name, size=PAGES * PAGE + 1)
    manifest = describe_pools(Pools(target, None, mamba, name, False), GDN)
    assert {part.items for part in manifest.of(Role.TARGET_KEY)} == {PAGES + 1}


def test_rejects_rows_that_the_pool_does_not_count(plain: Pools) -> None:
    with patch.object(plain.target.full_kv_pool, "size", PAGE):
        _rejects(plain, GDN, "found 16 token rows, expected 4 and a page of 4")


def test_rejects_a_tensor_of_another_dtype(plain: Pools) -> None:
    with patch.object(plain.target.full_kv_pool, "dtype", torch.float8_e4m3fn):
        _rejects(plain, GDN, "found a tensor of bfloat16, expected the pool's float8_e4m3fn")


def test_rejects_layers_that_differ(plain: Pools) -> None:
    inner = plain.target.full_kv_pool
    wide = torch.zeros(16, 2, 12, dtype=torch.bfloat16)[..., :6]
    with patch.object(inner, "k_buffer", [inner.k_buffer[0], wide]):
        _rejects(plain, GDN, "target_key of layer 3", "differ from those of target_key of layer 1")


def test_rejects_too_few_buffers(plain: Pools) -> None:
    with patch.object(plain.target.full_kv_pool, "v_buffer", plain.target.full_kv_pool.v_buffer[:1]):
        _rejects(plain, GDN, "1 buffers of target_value for 2 layers")


def test_rejects_layer_ids_that_do_not_fit(plain: Pools) -> None:
    with patch.object(plain.target, "full_attention_layer_id_mapping", {1: 0}):
        _rejects(plain, GDN, "MHATokenToKVPool: 2 layers, but layer ids for {1: 0}")


def test_rejects_a_tensor_outside_its_storage(plain: Pools) -> None:
    """The bytes that a view claims to have must be those of its allocation."""
    inner = plain.target.full_kv_pool
    honest = inner.k_buffer[0]
    liar = SimpleNamespace(
        shape=honest.shape,
        dtype=honest.dtype,
        stride=lambda: (1000, 6, 1),
        data_ptr=honest.data_ptr,
        element_size=honest.element_size,
        untyped_storage=honest.untyped_storage,
    )
    with patch.object(inner, "k_buffer", [liar, liar]):
        _rejects(plain, GDN, "target_key of layer 1", "not within its storage")


@pytest.mark.parametrize("which", ["target", "mamba"])
def test_rejects_bytes_that_sglang_would_transfer_and_no_role_describes(plain: Pools, which: str) -> None:
    pool = plain.mamba if which == "mamba" else plain.target.full_kv_pool
    infos = pool.get_contiguous_buf_infos()
    more = tuple([*column, extra] for column, extra in zip(infos, (4096, 64, 16), strict=True))
    with patch.object(pool, "get_contiguous_buf_infos", lambda: more):
        _rejects(plain, GDN, "1 not described, the first at 0x1000 with 64 bytes in items of 16")


def test_rejects_items_of_another_length_than_sglang_says(plain: Pools) -> None:
    pointers, sizes, items = plain.mamba.get_contiguous_buf_infos()
    with patch.object(plain.mamba, "get_contiguous_buf_infos", lambda: (pointers, sizes, [2 * n for n in items])):
        _rejects(plain, GDN, "6 not described", "6 unknown to SGLang")


def test_rejects_replayssm_rings() -> None:
    with platform("cuda"):
        params = cache_params(GDN.linear, GDN.linear_layers, 1, kda=False)
        mamba = mamba_pool(params, GDN.linear_layers, enable_linear_replayssm=True, draft_tokens=None)
        target = kv_pool(GDN, GDN.attention_layers, 1, mamba, "cuda")
    _rejects(Pools(target, None, mamba, "cuda", False), GDN, "replayssm_d", "--enable-linear-replayssm")


def test_rejects_slot_siblings() -> None:
    pools = build(GDN, 1)
    pools.mamba.register_slot_state(
        ShortConvPool(size=SLOTS, state_shape=(4, 2), layer_ids=[1], dtype=torch.bfloat16, device="cpu")
    )
    _rejects(pools, GDN, "ShortConvPool keeps more state per slot")


def test_rejects_other_state(plain: Pools) -> None:
    state = SimpleNamespace(**vars(plain.mamba.mamba_cache), novel=torch.zeros(3, 3))
    with patch.object(plain.mamba, "mamba_cache", state):
        _rejects(plain, GDN, "novel is state of a kind that is not described")
    two = dataclasses.replace(plain.mamba.mamba_cache, conv=plain.mamba.mamba_cache.conv * 2)
    with patch.object(plain.mamba, "mamba_cache", two):
        _rejects(plain, GDN, "found 2 conv tensors, expected 1")
    with _subclass(plain.mamba, "UnifiedMambaPool"):
        _rejects(plain, GDN, "UnifiedMambaPool: is no pool whose linear state is described")


def test_rejects_slots_that_the_pool_does_not_count(plain: Pools) -> None:
    with patch.object(plain.mamba, "size", SLOTS + 1):
        _rejects(plain, GDN, "conv: found shape [3, 3, 40, 3], expected [3, 4, any, any]")


def test_rejects_missing_and_foreign_state_pools(plain: Pools) -> None:
    with patch.object(plain.target, "mamba_pool", None):
        _rejects(plain, GDN, "linear-attention layers: the pools hold none")
    _rejects(plain, GDN, "not the one that the target's KV pool refers to", mamba_pool=build(GDN, 1).mamba)
    with patch.object(plain.draft, "mamba_pool", build(GDN, 1).mamba):
        _rejects(plain, GDN, "the draft keeps linear state of its own")


def test_accepts_a_draft_without_a_hybrid_pool(plain: Pools) -> None:
    """Nemotron-H's MTP module gets a plain pool with one layer."""
    inner = plain.draft.full_kv_pool
    expected = describe_pools(plain, GDN)
    assert describe_pools(plain, GDN, draft_pool=inner) == expected


@pytest.mark.parametrize(
    ("item", "channels", "hint", "axis"),
    [
        ((40, 3), 40, None, 1),
        ((3, 40), 40, None, 0),
        ((5, 40), 40, None, 0),
        ((40, 3), 40, 1, 1),
        ((4, 3), 3, None, 0),  # as many channels as live rows, but four rows can only be a window
        ((3, 3), 3, 0, 0),
        ((3, 3), 3, 1, 1),
    ],
)
def test_window_axis(item: tuple[int, int], channels: int, hint: int | None, axis: int) -> None:
    assert window_axis_of(item, channels, 3, hint) == axis


@pytest.mark.parametrize(
    ("item", "hint", "part"),
    [
        ((40, 5), None, "expected [channel, window] = [40, 3]"),  # more rows than K-1 only exist window first
        ((2, 40), None, "found slots of [2, 40]"),
        ((40, 3), 0, "conv_window_axis is 0, but slots of [40, 3] have it at 1"),
    ],
)
def test_rejects_windows_that_do_not_fit(item: tuple[int, int], hint: int | None, part: str) -> None:
    with pytest.raises(ManifestError) as caught:
        window_axis_of(item, 40, 3, hint)
    assert part in str(caught.value)


def test_square_slots_need_a_hint() -> None:
    model = _linear(conv_segments=tuple(divided(name, 1, 1) for name in "qkv"), ssm_heads=1, ssm_rows=1, ssm_columns=1)
    for name, axis in (("cuda", 1), ("npu", 0)):
        with patch("tests.unit.layout.live_pools.DRAFT_TOKENS", 1):
            pools = build(model, 1, name)
        fill(pools, model)
        _rejects(pools, model, "cannot be read off", "conv_window_axis")
        assert_read_back(describe_pools(pools, model, conv_window_axis=axis), fill(pools, model))


def test_needs_no_torch() -> None:
    """The modules are importable where neither torch nor SGLang is."""
    import subprocess
    import sys

    script = "import sys; sys.modules |= dict.fromkeys(('torch', 'sglang', 'numpy')); import sglang_hetero.layout.pools"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
