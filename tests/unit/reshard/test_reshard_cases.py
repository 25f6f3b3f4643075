"""Faults that people met in the field, each with its smallest input; the numbers are those of the table of cases.

Every byte of every destination buffer is compared, so "the neighbour is untouched" is part of each of them.
"""

import dataclasses

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sglang_hetero.errors import LayoutMismatch, ManifestError
from sglang_hetero.layout import Axis, AxisName, Component, Coordinates, Item, Manifest, Role, Segment, Side, wire
from sglang_hetero.merge.assemble import Assembler
from sglang_hetero.reshard import STRICT, Policy, bind_pages, bind_slot, plan
from tests.reshard_oracle import model as m
from tests.reshard_oracle.handover import Place, Request, decode_rank, prefill_ranks, serve
from tests.reshard_oracle.rank import CHANNELS_FIRST, WINDOW_FIRST, Format, Shape

SHAPE = Shape()
DRAFT = frozenset({Role.DRAFT_KEY, Role.DRAFT_VALUE})


def kv(heads, layers=(0, 1), dtype="bfloat16", width=4):
    return (
        m.heads_kv(Role.TARGET_KEY, heads, width, layers, dtype),
        m.heads_kv(Role.TARGET_VALUE, heads, width, layers, dtype),
    )


def draft_kv(heads, width=4):
    return (m.heads_kv(Role.DRAFT_KEY, heads, width, (0,)), m.heads_kv(Role.DRAFT_VALUE, heads, width, (0,)))


def qkv(q, k, v, layers=(0, 1)):
    """A conv state with so many channels per segment, each channel a head of its own."""
    return (m.conv((m.Segment("q", q), m.Segment("k", k), m.Segment("v", v)), 4, layers),)


def hand_over(model, p, d, tokens=3, **options):
    return serve(model, (p, SHAPE), (d, SHAPE), Request(tokens), **options)


def manifests(model, p, d, decode_model=None, shape=SHAPE):
    sources = [rank.manifest for rank in prefill_ranks(model, p, shape)]
    return sources, [decode_rank(decode_model or model, d, rank, shape).manifest for rank in range(d)]


def test_case_01_more_decode_ranks_than_heads():
    sources, destinations = manifests(kv(2), 1, 4)
    heads = [[block.source for share in plan(sources, to).shares for block in share.blocks] for to in destinations]
    assert heads == [[0, 0], [0, 0], [1, 1], [1, 1]]  # K and V
    hand_over(kv(2), 1, 4)


@pytest.mark.parametrize("p", [1, 2])
def test_case_02_conv_segments_to_many_ranks(p):
    hand_over(qkv(8, 8, 16), p, 4)


def test_case_03_conv_segments_from_many_ranks():
    hand_over(qkv(16, 16, 32), 8, 1)


def test_case_04_window_first_neighbour():
    shape = Shape(slots=3, formats={Role.CONV: WINDOW_FIRST})
    at = {"prefill": Place((1,), 1), "decode": Place((1,), 2)}
    serve(qkv(8, 8, 16), (2, shape), (1, shape), Request(1), at=at)


@pytest.mark.parametrize("source", [CHANNELS_FIRST, WINDOW_FIRST], ids=["from_channels_first", "from_window_first"])
@pytest.mark.parametrize("to", [CHANNELS_FIRST, WINDOW_FIRST], ids=["to_channels_first", "to_window_first"])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_case_05_channels_first_shape_over_window_first_bytes(source, to, tp):
    shapes = [Shape(slots=3, formats={Role.CONV: form}) for form in (source, to)]
    serve(qkv(8, 8, 16), (tp[0], shapes[0]), (tp[1], shapes[1]), Request(1))


@pytest.mark.parametrize("rows", [(0, 2), (2, 0), (1, 3)], ids=lambda rows: f"draft_rows_{rows[0]}_{rows[1]}")
def test_case_05_only_live_window_rows_travel(rows):
    shapes = [Shape(formats={Role.CONV: Format(order=(1, 0), dead_before=dead)}) for dead in rows]
    moved = serve(qkv(8, 8, 16), (2, shapes[0]), (1, shapes[1]), Request(1))
    assert sum(moved[0].nbytes.values()) == 2 * (8 + 8 + 16) * 3 * 2  # layers, channels, live rows, bytes


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=["P1D2", "P2D1"])
def test_case_06_one_segment_sharded_two_replicated(tp):
    segments = (m.Segment("x", 16), m.Segment("B", 1, 4, replicated=True), m.Segment("C", 1, 4, replicated=True))
    hand_over((m.conv(segments, 4, (0, 1)),), *tp)


def test_case_07_replicated_heads_counted_once():
    shape = Shape(page_size=128, pages=3)
    serve(kv(2), (4, shape), (1, shape), Request(129))


def test_case_08_each_head_from_one_writer():
    sources, (to,) = manifests(kv(4, layers=(0,)), 8, 1)
    for role in (Role.TARGET_KEY, Role.TARGET_VALUE):
        blocks = [block for share in plan(sources, to).shares if share.role is role for block in share.blocks]
        assert sorted((block.destination, block.size) for block in blocks) == [(head, 1) for head in range(4)]
    (moved,) = hand_over(kv(4, layers=(0,), width=256), 8, 1, tokens=8)
    assert sum(moved.nbytes.values()) == 2 * 8 * 4 * 256 * 2


def far(side, page_size, component):
    return Manifest(
        side=side,
        host="far",
        coordinates=Coordinates(),
        page_size=page_size,
        model="oracle",
        incarnation="1",
        sglang="0.5.23",
        components=(component,),
    )


def distant_slots(side, stride):
    """An SSM pool of 5 slots that lie `stride` bytes apart, at an address where the sum needs all 64 bits."""
    axes = (
        Axis(AxisName.HEAD, 2, 32, (Segment("ssm", 2, 1),)),
        Axis(AxisName.STATE_ROW, 2, 16),
        Axis(AxisName.STATE_COLUMN, 4, 4),
    )
    component = Component(Role.SSM, Item.SLOT, "float32", (0,), axes, 5, stride, ((1 << 63) - stride,))
    return far(side, 1, component)


@pytest.mark.parametrize("stride", [(1 << 29) + 64, (1 << 30) + 64, 1 << 40], ids=["2**31", "2**32", "2**42"])
def test_case_09_offsets_do_not_wrap(stride):
    source = distant_slots(Side.PREFILL, stride)
    (share,) = plan([source], distant_slots(Side.DECODE, stride)).shares
    found = bind_slot(share, 0, 4)
    assert found.source.tolist() == [(1 << 63) - stride + 4 * stride]
    assert found.sizes.tolist() == [64]


def test_case_09_page_offsets_do_not_wrap():
    axes = (
        Axis(AxisName.TOKEN, 2, 1 << 20),
        Axis(AxisName.HEAD, 2, 1 << 19, (Segment("kv", 2, 1),)),
        Axis(AxisName.CHANNEL, 1 << 19, 1),
    )
    component = Component(Role.TARGET_KEY, Item.PAGE, "int8", (0,), axes, 5000, 1 << 21, (1 << 40,))
    sides = [far(side, 2, component) for side in Side]
    (share,) = plan(sides[:1], sides[1]).shares
    found = bind_pages(share, 0, [4097, 1025, 4099], 5)
    assert found.source.tolist() == [(1 << 40) + page * (1 << 21) for page in (4097, 1025, 4099)]
    assert found.sizes.tolist() == [1 << 21, 1 << 21, 1 << 20]


def test_case_09_merge_beyond_four_gigabytes():
    stride = (1 << 30) + 64
    source, to = (distant_slots(side, stride) for side in (Side.PREFILL, Side.DECODE))
    memory = np.zeros(4 * stride + 64, dtype=np.uint8)  # virtual: only what is written takes memory
    assembler = Assembler(plan([source], to), {(Role.SSM, 0): torch.from_numpy(memory)})
    area = np.arange(1, 65, dtype=np.uint8)
    assembler.merge_slot(Role.SSM, 0, torch.tensor([4]), {0: torch.from_numpy(area)})
    assert memory[4 * stride :].tolist() == area.tolist()
    for wrapped in (4 * stride % 2**32, 4 * stride % 2**31):
        assert not memory[wrapped : wrapped + 64].any()


@pytest.mark.parametrize("tp", [(2, 3), (3, 2)], ids=["P2D3", "P3D2"])
def test_case_10_sizes_that_do_not_divide(tp):
    hand_over((*kv(6), *qkv(6, 6, 12, layers=(2,)), m.ssm(6, 2, 3, (2,)), *draft_kv(6)), *tp)


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["P2D1", "P1D2"])
def test_case_11_each_component_has_its_own_dtype(tp):
    (state,) = qkv(8, 8, 16, layers=(2,))
    model = (*kv(2, dtype="int8"), state, m.ssm(4, 2, 3, (2,)))
    assert [tensor.dtype for tensor in model] == ["int8", "int8", "bfloat16", "float32"]
    hand_over(model, *tp)


def test_case_12_axes_of_equal_size_in_another_order():
    ours = m.ssm(4, 4, 4, (0,))
    head, row, column = ours.axes
    theirs = dataclasses.replace(ours, axes=(head, column, row))
    sources, _ = manifests((theirs,), 1, 1)
    _, (to,) = manifests((ours,), 1, 1)
    assert sources[0].components[0].item_span == to.components[0].item_span
    assert sources[0].fingerprint != to.fingerprint
    with pytest.raises(LayoutMismatch, match=r"head, state_column, state_row.*head, state_row, state_column"):
        plan(sources, to)


def test_case_13_unknown_role_is_refused():
    (source,), _ = manifests(kv(2), 1, 1)
    data = wire.encode(source)
    unknown = data.replace(b"\xactarget_value", b"\xactarget_cross")
    assert unknown != data
    with pytest.raises(ManifestError, match="target_cross"):
        wire.decode(unknown)


def test_case_13_role_that_the_other_side_lacks_is_refused():
    rope = m.latent_kv(Role.TARGET_ROPE, {"rope": 2}, (0,))
    sources, (to,) = manifests((*kv(2), rope), 1, 1, decode_model=kv(2))
    with pytest.raises(LayoutMismatch, match=r"prefill.* has target_rope, decode.* has none"):
        plan(sources, to)


def test_case_14_draft_on_decode_only():
    model = (*kv(2), *draft_kv(2))
    sources, (to,) = manifests(kv(2), 2, 1, decode_model=model)
    with pytest.raises(LayoutMismatch, match=r"decode.* has draft_key, prefill.* has none"):
        plan(sources, to, STRICT)
    policy = Policy(start_empty=DRAFT)
    assert plan(sources, to, policy).missing == DRAFT
    assert plan(sources, to) == plan(sources, to, policy), "a transfer plans with this"
    assert "has no draft model" in plan(sources, to).unequal_drafts
    hand_over(kv(2), 2, 1, decode_model=model, policy=policy)


def test_case_14_draft_on_prefill_only():
    model = (*kv(2), *draft_kv(2))
    sources, (to,) = manifests(model, 2, 1, decode_model=kv(2))
    with pytest.raises(LayoutMismatch, match=r"prefill.* has draft_key, decode.* has none"):
        plan(sources, to, STRICT)
    policy = Policy(drop=DRAFT)
    assert plan(sources, to) == plan(sources, to, policy), "a transfer plans with this"
    assert "its draft caches are not sent" in plan(sources, to).unequal_drafts
    hand_over(model, 2, 1, decode_model=kv(2), policy=Policy(drop=DRAFT))


def test_case_14_state_is_never_left_out():
    model = (*kv(2), m.ssm(4, 2, 3, (2,)))
    sources, (to,) = manifests(kv(2), 2, 1, decode_model=model)
    with pytest.raises(LayoutMismatch, match=r"decode.* has ssm, prefill.* has none"):
        plan(sources, to, Policy(start_empty=DRAFT, drop=DRAFT))
    with pytest.raises(ValueError, match="ssm: only draft roles"):
        Policy(start_empty=frozenset({Role.SSM}))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 2)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_case_19_page_tail(tp, tokens):
    shape = Shape(page_size=128, pages=4)
    (moved, *_) = serve(kv(2), (tp[0], shape), (tp[1], shape), Request(tokens))
    assert sum(moved.nbytes.values()) == 2 * 2 * tokens * (2 // tp[1]) * 4 * 2  # roles, layers, heads, width, bytes


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["P2D1", "P1D2"])
def test_case_23_draft_entries_appended_or_mixed_in(tp):
    """Components are found by role and layer, never by their place in a list."""
    target, draft = kv(2), draft_kv(2)
    hand_over(target, *tp, decode_model=(*target, *draft), policy=Policy(start_empty=DRAFT))
    mixed = (draft[1], target[1], target[0], draft[0])
    hand_over((*target, *draft), *tp, decode_model=mixed)


def test_case_23_layer_ids_of_draft_and_target_do_not_collide():
    (to,) = manifests((*kv(2), *draft_kv(2)), 1, 1)[1]
    assert to.components[0].layers[0] == to.components[2].layers[0] == 0
    with pytest.raises(ManifestError, match="layer 0 of target_key is described twice"):
        replace(to, components=(*to.components, to.components[0]))
