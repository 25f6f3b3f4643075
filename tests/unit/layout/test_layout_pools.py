"""Manifests of SGLang's real pools: what is written through a pool is found by the manifest's numbers alone."""

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.ple_state_pool import ShortConvPool

from sglang_hetero.errors import ManifestError, TopologyError
from sglang_hetero.layout import AxisName, Component, Manifest, Role, Segment, Sharding, Side
from sglang_hetero.layout.component import PLAIN
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.kv_pools import FIA_NZ
from sglang_hetero.layout.pools import describe
from sglang_hetero.layout.state_pools import LiveRows, window_axis_of
from sglang_hetero.layout.wire import decode, encode
from tests.unit.layout.live_pools import (
    DRAFT_TOKENS,
    PAGE,
    PAGES,
    PLATFORMS,
    SLOTS,
    Pools,
    build,
    cache_params,
    coordinates,
    fill,
    kv_pool,
    mamba_pool,
    platform,
    value,
)


def divided(name: str, heads: int, width: int) -> Segment:
    return Segment(name, heads, width, Sharding.DIVIDED)


GDN = ModelGeometry(
    attention=HeadAttention(kv_heads=2, key_width=6, value_width=6),
    attention_layers=(1, 3),
    linear=LinearAttention(
        conv_segments=(divided("q", 4, 3), divided("k", 4, 3), divided("v", 8, 2)),
        conv_kernel=4,
        ssm_heads=8,
        ssm_rows=2,
        ssm_columns=3,
    ),
    linear_layers=(0, 2, 4),
    draft_layers=(0,),
)


def _mamba2(groups: int) -> ModelGeometry:
    sharding = Sharding.DIVIDED if groups > 1 else Sharding.REPLICATED
    return ModelGeometry(
        attention=HeadAttention(kv_heads=4, key_width=4, value_width=4),
        attention_layers=(0, 1),
        linear=LinearAttention(
            conv_segments=(divided("x", 8, 2), Segment("B", groups, 3, sharding), Segment("C", groups, 3, sharding)),
            conv_kernel=4,
            ssm_heads=8,
            ssm_rows=2,
            ssm_columns=3,
        ),
        linear_layers=(0, 1),
    )


KIMI = ModelGeometry(
    attention=LatentAttention(latent_width=32, rope_width=16),
    attention_layers=(3,),
    linear=LinearAttention(
        conv_segments=tuple(divided(name, 4, 5) for name in "qkv"),
        conv_kernel=4,
        ssm_heads=4,
        ssm_rows=5,
        ssm_columns=5,
    ),
    linear_layers=(0, 1, 2),
    draft_layers=(0,),
)
MODELS = {"gdn": GDN, "mamba2-8-groups": _mamba2(8), "mamba2-1-group": _mamba2(1), "kimi": KIMI}


def _describe(pools: Pools, model: ModelGeometry, tp: int = 1, rank: int = 0, **changes: Any) -> Manifest:
    options: dict[str, Any] = {
        "side": Side.PREFILL,
        "host": "test",
        "coordinates": coordinates(tp, rank),
        "model": model,
        "fingerprint": "model",
        "incarnation": "first",
        "target_pool": pools.target,
        "draft_pool": pools.draft,
    }
    return describe(**options | changes)


def _read(component: Component, layer: int) -> Any:
    """[item, axes] from raw memory by nothing but the component's numbers; of a window the live rows only."""
    starts = [axis.live_rows[0] for axis in component.axes]
    shape = (component.items, *(axis.live_rows[1] for axis in component.axes))
    item, *indices = np.indices(shape, sparse=True)
    offsets = item * component.item_stride
    for axis, start, index in zip(component.axes, starts, indices, strict=True):
        offsets = offsets + (index + start) * axis.stride
    span = (component.items - 1) * component.item_stride + component.item_span
    raw = (ctypes.c_uint8 * span).from_address(component.address(layer))
    memory = np.frombuffer(raw, np.uint8)
    elements = memory[offsets[..., None] + np.arange(component.itemsize)]
    return np.ascontiguousarray(elements).view(f"u{component.itemsize}")[..., 0]


def _assert_read_back(manifest: Manifest, written: dict[tuple[Role, int], tuple[int, ...]]) -> None:
    found = {(component.role, layer) for component in manifest.components for layer in component.layers}
    assert found == set(written)
    for component in manifest.components:
        for layer in component.layers:
            got, shape = _read(component, layer), written[component.role, layer]
            assert got.shape == shape, f"{component.role} of layer {layer}"
            wanted = value(component.role, layer, np.indices(shape, sparse=True), component.itemsize * 8)
            wrong = np.argwhere(got != wanted)
            assert not len(wrong), (
                f"{component.role} of layer {layer} at {tuple(wrong[0])}: read {got[tuple(wrong[0])]:#x}, written "
                f"{wanted[tuple(wrong[0])]:#x}"
            )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("family", MODELS)
def test_reads_back_what_the_pool_was_given(family: str, name: str, tp: int) -> None:
    model = MODELS[family]
    pools = build(model, tp, name, kda=family == "kimi")
    written = fill(pools, model)
    for rank in range(tp):
        manifest = _describe(pools, model, tp, rank)
        _assert_read_back(manifest, written)
        assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize("name", ["cuda", "npu", "npu-fia"])
def test_pages_of_one_token(name: str) -> None:
    pools = build(GDN, 2, name, page_size=1)
    written = fill(pools, GDN)
    _assert_read_back(_describe(pools, GDN, 2, 1), written)


def test_axes_in_canonical_order() -> None:
    for name in PLATFORMS:
        manifest = _describe(build(GDN, 1, name), GDN)
        axes = {component.role: [axis.name for axis in component.axes] for component in manifest.components}
        assert axes[Role.TARGET_KEY] == axes[Role.DRAFT_VALUE] == [AxisName.TOKEN, AxisName.HEAD, AxisName.CHANNEL]
        assert axes[Role.CONV] == [AxisName.CHANNEL, AxisName.WINDOW]
        assert axes[Role.SSM] == [AxisName.HEAD, AxisName.STATE_ROW, AxisName.STATE_COLUMN]
        assert [item.items for item in manifest.components][:1] == [PAGES + 1]
        assert manifest.of(Role.SSM)[0].items == SLOTS + 1


def test_replicated_key_value_heads() -> None:
    """TP 4 over 2 heads: the total is the model's, not ranks times local heads."""
    pools = build(GDN, 4)
    for rank in range(4):
        axis = _describe(pools, GDN, 4, rank).of(Role.TARGET_KEY)[0].cut_axis
        assert axis.size == 1
        assert axis.segments == (Segment("kv", 2, 1),)
        assert axis.segments[0].local_heads(4, rank) == range(rank // 2, rank // 2 + 1)


def test_equal_layouts_have_equal_fingerprints() -> None:
    """An NPU's pages and its FIA view are the same bytes, and so are CUDA's; the conv order is not."""
    npu, fia, cuda = (_describe(build(GDN, 2, name), GDN, 2) for name in ("npu", "npu-fia", "cuda"))
    assert npu.fingerprint == fia.fingerprint != cuda.fingerprint
    assert npu.of(Role.TARGET_KEY)[0].axes == cuda.of(Role.TARGET_KEY)[0].axes


def test_window_with_room_for_draft_tokens() -> None:
    pools = build(GDN, 1, "npu")
    window = _describe(pools, GDN).of(Role.CONV)[0].axis(AxisName.WINDOW)
    assert (window.size, window.live) == (3 + DRAFT_TOKENS - 1, (DRAFT_TOKENS - 1, 3))
    first = _describe(pools, GDN, conv_live_rows=LiveRows.FIRST).of(Role.CONV)[0].axis(AxisName.WINDOW)
    assert (first.size, first.live) == (window.size, (0, 3))


def test_window_first_in_memory_only() -> None:
    """With AMX the shape says [channel, window] and the bytes lie the other way round."""
    conv = _describe(build(GDN, 1, "amx"), GDN).of(Role.CONV)[0]
    channels = conv.axis(AxisName.CHANNEL)
    assert (channels.stride, conv.axis(AxisName.WINDOW).stride) == (2, 2 * channels.size)


def test_eight_bit_floats_are_named_not_their_bytes() -> None:
    pools = build(GDN, 1, dtype=torch.float8_e4m3fn)
    assert pools.target.get_key_buffer(1).dtype == torch.float8_e4m3fn
    assert _describe(pools, GDN).of(Role.TARGET_KEY)[0].dtype == "float8_e4m3fn"
    _assert_read_back(_describe(pools, GDN), fill(pools, GDN))


def test_slots_inside_a_shared_envelope() -> None:
    """MambaPool with envelope_layout: slots are as far apart as all layers' states together."""
    with platform("cuda"):
        params = cache_params(GDN.linear, GDN.linear_layers, 1, kda=False)
        mamba = mamba_pool(params, GDN.linear_layers, envelope_layout=True)
        pools = Pools(kv_pool(GDN, GDN.attention_layers, 1, mamba, "cuda"), None, mamba, "cuda", False)
    manifest = _describe(pools, GDN)
    conv, ssm = manifest.of(Role.CONV)[0], manifest.of(Role.SSM)[0]
    assert conv.item_stride == ssm.item_stride == len(GDN.linear_layers) * (conv.item_span + ssm.item_span)
    _assert_read_back(manifest, fill(pools, dataclasses.replace(GDN, draft_layers=())))


def test_reserved_rows_of_a_pool_sized_late() -> None:
    """post_capture_active: more rows are reserved than the pool may use."""
    pools = build(GDN, 1)
    inner = pools.target.full_kv_pool
    inner.size, inner.post_capture_active = (PAGES - 1) * PAGE, True
    assert _describe(pools, GDN).of(Role.TARGET_KEY)[0].items == PAGES


def test_nz_latent_is_moved_whole() -> None:
    with patch.dict("os.environ", SGLANG_USE_FIA_NZ="1"):
        pools = build(KIMI, 2, "npu", kda=True)
    manifest = _describe(pools, KIMI, 2)
    kinds = {component.role: component.encoding for component in manifest.components}
    assert {kinds[role] for role in (Role.TARGET_LATENT, Role.TARGET_ROPE, Role.DRAFT_LATENT)} == {FIA_NZ}
    assert kinds[Role.CONV] == PLAIN
    plain = _describe(build(KIMI, 2, "npu", kda=True), KIMI, 2)
    assert manifest.fingerprint != plain.fingerprint
    latent = manifest.of(Role.TARGET_LATENT)[0]
    buffer = pools.target.get_key_buffer(3)
    assert (latent.address(3), latent.item_stride) == (buffer.data_ptr(), buffer[0].nbytes)
    assert decode(encode(manifest)) == manifest


def test_latent_segments() -> None:
    one = _describe(build(KIMI, 1, kda=True), KIMI).of(Role.TARGET_LATENT)[0].cut_axis
    assert [(part.name, part.width, part.sharding) for part in one.segments] == [
        ("latent", 32, Sharding.REPLICATED),
        ("rope", 16, Sharding.REPLICATED),
    ]
    split = _describe(build(KIMI, 1, "npu", kda=True), KIMI)
    for role, width in ((Role.TARGET_LATENT, 32), (Role.TARGET_ROPE, 16), (Role.DRAFT_ROPE, 16)):
        assert split.of(role)[0].cut_axis.size == width


@pytest.mark.parametrize("name", PLATFORMS)
def test_nothing_that_sglang_transfers_is_left_out(name: str) -> None:
    """The described buffers and items are those of setup_state_kv_args and get_contiguous_buf_infos."""
    pools = build(GDN, 2, name)
    manifest = _describe(pools, GDN, 2)
    sources = [pools.target.get_contiguous_buf_infos(), pools.draft.get_contiguous_buf_infos()]
    sources.append(pools.target.get_state_buf_infos())
    theirs = {entry for source in sources for entry in zip(*source, strict=True)}
    ours = {
        (address, part.items * part.item_stride, part.item_span)
        for part in manifest.components
        for address in part.addresses
    }
    assert ours == theirs
    linear = zip(pools.mamba.get_state_layer_ids(), pools.mamba.get_contiguous_buf_infos()[0], strict=True)
    addresses = {(layer, part.address(layer)) for part in manifest.components for layer in part.layers}
    assert set(linear) <= addresses


def test_stage_of_a_pipeline() -> None:
    """A stage holds an unbroken run of the model's layers; a hole in it is refused."""

    def stage(attention: tuple[int, ...], linear: tuple[int, ...]) -> Manifest:
        with platform("cuda"):
            mamba = mamba_pool(cache_params(GDN.linear, linear, 1, kda=False), linear)
            pools = Pools(kv_pool(GDN, attention, 1, mamba, "cuda"), None, mamba, "cuda", False)
        return _describe(pools, GDN, coordinates=coordinates(1, 0, pp_rank=1, pp_size=2))

    manifest = stage((3,), (2, 4))
    assert {(part.role, part.layers) for part in manifest.components} == {
        (Role.TARGET_KEY, (3,)),
        (Role.TARGET_VALUE, (3,)),
        (Role.CONV, (2, 4)),
        (Role.SSM, (2, 4)),
    }
    assert stage((), (4,)).roles == {Role.CONV, Role.SSM}
    assert stage((3,), ()).roles == {Role.TARGET_KEY, Role.TARGET_VALUE}
    with pytest.raises(ManifestError, match=r"linear-attention layers: the pools hold 4, expected 2, 4"):
        stage((1, 3), (4,))


# What is refused. Each pool is right but for one thing.


def _rejects(pools: Pools, model: ModelGeometry, *parts: str, **changes: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        _describe(pools, model, **changes)
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
        _describe(plain, model, 4)


def test_rejects_linear_heads_fewer_than_ranks() -> None:
    """On a CPU SGLang pads them: the shapes are those of replicated heads, the content is not."""
    model = _linear(conv_segments=tuple(divided(name, 2, 3) for name in "qkv"), ssm_heads=2, ssm_rows=3)
    pools = build(_linear(conv_segments=tuple(divided(name, 4, 3) for name in "qkv"), ssm_heads=4, ssm_rows=3), 4)
    pools.mamba.conv_shard_groups = None
    with pytest.raises(TopologyError, match="segment q: 2 heads cannot be divided among TP 4"):
        _describe(pools, model, 4)


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
    expected = _describe(plain, GDN)
    assert _describe(plain, GDN, draft_pool=inner) == expected


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
        _assert_read_back(_describe(pools, model, conv_window_axis=axis), fill(pools, model))


def test_needs_no_torch() -> None:
    """The modules are importable where neither torch nor SGLang is."""
    import subprocess
    import sys

    script = "import sys; sys.modules |= dict.fromkeys(('torch', 'sglang', 'numpy')); import sglang_hetero.layout.pools"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
