"""Manifests of SGLang's real pools: what is written through a pool is found by the manifest's numbers alone."""

import dataclasses
from unittest.mock import patch

import pytest
import torch

from sglang_hetero.errors import ManifestError
from sglang_hetero.layout import AxisName, Manifest, Role, Segment, Sharding
from sglang_hetero.layout.component import PLAIN
from sglang_hetero.layout.kv_pools import FIA_NZ
from sglang_hetero.layout.state_pools import LiveRows
from sglang_hetero.layout.wire import decode, encode
from tests.unit.layout.described import GDN, KIMI, MODELS, assert_read_back, describe_pools
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
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("family", MODELS)
def test_reads_back_what_the_pool_was_given(family: str, name: str, tp: int) -> None:
    model = MODELS[family]
    pools = build(model, tp, name, kda=family == "kimi")
    written = fill(pools, model)
    for rank in range(tp):
        manifest = describe_pools(pools, model, tp, rank)
        assert_read_back(manifest, written)
        assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize("name", ["cuda", "npu", "npu-fia"])
def test_pages_of_one_token(name: str) -> None:
    pools = build(GDN, 2, name, page_size=1)
    written = fill(pools, GDN)
    assert_read_back(describe_pools(pools, GDN, 2, 1), written)


def test_axes_in_canonical_order() -> None:
    for name in PLATFORMS:
        manifest = describe_pools(build(GDN, 1, name), GDN)
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
        axis = describe_pools(pools, GDN, 4, rank).of(Role.TARGET_KEY)[0].cut_axis
        assert axis.size == 1
        assert axis.segments == (Segment("kv", 2, 1),)
        assert axis.segments[0].local_heads(4, rank) == range(rank // 2, rank // 2 + 1)


WHOLE = Segment("kv", 2, 1, Sharding.REPLICATED)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", PLATFORMS)
def test_draft_with_all_heads_on_every_rank(name: str, tp: int) -> None:
    """The draft's pool is that of TP 1 beside a target of `tp`; with TP 4 the target's heads are replicated as well."""
    pools = build(GDN, tp, name, draft_tp=1)
    written = fill(pools, GDN)
    for rank in range(tp):
        manifest = describe_pools(pools, GDN, tp, rank)
        assert_read_back(manifest, written)
        for role in (Role.DRAFT_KEY, Role.DRAFT_VALUE):
            assert manifest.of(role)[0].cut_axis.segments == (WHOLE,)
        assert manifest.of(Role.TARGET_KEY)[0].cut_axis.segments == (Segment("kv", 2, 1),)
        assert decode(encode(manifest)) == manifest
    assert describe_pools(build(GDN, tp, name), GDN, tp).of(Role.DRAFT_KEY)[0].cut_axis.segments != (WHOLE,)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_head_is_no_whole_draft(tp: int) -> None:
    """Where a rank's share is all heads the bytes are the same, and so is the description."""
    single = dataclasses.replace(GDN, attention=dataclasses.replace(GDN.attention, kv_heads=1))
    expected, found = (describe_pools(build(single, tp, draft_tp=size), single, tp) for size in (tp, 1))
    assert found.fingerprint == expected.fingerprint
    assert {part.cut_axis.segments for part in found.of(Role.DRAFT_KEY)} == {(Segment("kv", 1, 1),)}


def test_equal_layouts_have_equal_fingerprints() -> None:
    """An NPU's pages and its FIA view are the same bytes, and so are CUDA's; the conv order is not."""
    npu, fia, cuda = (describe_pools(build(GDN, 2, name), GDN, 2) for name in ("npu", "npu-fia", "cuda"))
    assert npu.fingerprint == fia.fingerprint != cuda.fingerprint
    assert npu.of(Role.TARGET_KEY)[0].axes == cuda.of(Role.TARGET_KEY)[0].axes


def test_window_with_room_for_draft_tokens() -> None:
    pools = build(GDN, 1, "npu")
    window = describe_pools(pools, GDN).of(Role.CONV)[0].axis(AxisName.WINDOW)
    assert (window.size, window.live) == (3 + DRAFT_TOKENS - 1, (DRAFT_TOKENS - 1, 3))
    first = describe_pools(pools, GDN, conv_live_rows=LiveRows.FIRST).of(Role.CONV)[0].axis(AxisName.WINDOW)
    assert (first.size, first.live) == (window.size, (0, 3))


def test_window_first_in_memory_only() -> None:
    """With AMX the shape says [channel, window] and the bytes lie the other way round."""
    conv = describe_pools(build(GDN, 1, "amx"), GDN).of(Role.CONV)[0]
    channels = conv.axis(AxisName.CHANNEL)
    assert (channels.stride, conv.axis(AxisName.WINDOW).stride) == (2, 2 * channels.size)


def test_eight_bit_floats_are_named_not_their_bytes() -> None:
    pools = build(GDN, 1, dtype=torch.float8_e4m3fn)
    assert pools.target.get_key_buffer(1).dtype == torch.float8_e4m3fn
    assert describe_pools(pools, GDN).of(Role.TARGET_KEY)[0].dtype == "float8_e4m3fn"
    assert_read_back(describe_pools(pools, GDN), fill(pools, GDN))


def test_slots_inside_a_shared_envelope() -> None:
    """MambaPool with envelope_layout: slots are as far apart as all layers' states together."""
    with platform("cuda"):
        params = cache_params(GDN.linear, GDN.linear_layers, 1, kda=False)
        mamba = mamba_pool(params, GDN.linear_layers, envelope_layout=True)
        pools = Pools(kv_pool(GDN, GDN.attention_layers, 1, mamba, "cuda"), None, mamba, "cuda", False)
    manifest = describe_pools(pools, GDN)
    conv, ssm = manifest.of(Role.CONV)[0], manifest.of(Role.SSM)[0]
    assert conv.item_stride == ssm.item_stride == len(GDN.linear_layers) * (conv.item_span + ssm.item_span)
    assert_read_back(manifest, fill(pools, dataclasses.replace(GDN, draft_layers=())))


def test_reserved_rows_of_a_pool_sized_late() -> None:
    """post_capture_active: more rows are reserved than the pool may use."""
    pools = build(GDN, 1)
    inner = pools.target.full_kv_pool
    inner.size, inner.post_capture_active = (PAGES - 1) * PAGE, True
    assert describe_pools(pools, GDN).of(Role.TARGET_KEY)[0].items == PAGES


def test_nz_latent_is_moved_whole() -> None:
    with patch.dict("os.environ", SGLANG_USE_FIA_NZ="1"):
        pools = build(KIMI, 2, "npu", kda=True)
    manifest = describe_pools(pools, KIMI, 2)
    kinds = {component.role: component.encoding for component in manifest.components}
    assert {kinds[role] for role in (Role.TARGET_LATENT, Role.TARGET_ROPE, Role.DRAFT_LATENT)} == {FIA_NZ}
    assert kinds[Role.CONV] == PLAIN
    plain = describe_pools(build(KIMI, 2, "npu", kda=True), KIMI, 2)
    assert manifest.fingerprint != plain.fingerprint
    latent = manifest.of(Role.TARGET_LATENT)[0]
    buffer = pools.target.get_key_buffer(3)
    assert (latent.address(3), latent.item_stride) == (buffer.data_ptr(), buffer[0].nbytes)
    assert decode(encode(manifest)) == manifest


def test_latent_segments() -> None:
    one = describe_pools(build(KIMI, 1, kda=True), KIMI).of(Role.TARGET_LATENT)[0].cut_axis
    assert [(part.name, part.width, part.sharding) for part in one.segments] == [
        ("latent", 32, Sharding.REPLICATED),
        ("rope", 16, Sharding.REPLICATED),
    ]
    split = describe_pools(build(KIMI, 1, "npu", kda=True), KIMI)
    for role, width in ((Role.TARGET_LATENT, 32), (Role.TARGET_ROPE, 16), (Role.DRAFT_ROPE, 16)):
        assert split.of(role)[0].cut_axis.size == width


@pytest.mark.parametrize("name", PLATFORMS)
def test_nothing_that_sglang_transfers_is_left_out(name: str) -> None:
    """The described buffers and items are those of setup_state_kv_args and get_contiguous_buf_infos."""
    pools = build(GDN, 2, name)
    manifest = describe_pools(pools, GDN, 2)
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
        return describe_pools(pools, GDN, coordinates=coordinates(1, 0, pp_rank=1, pp_size=2))

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
