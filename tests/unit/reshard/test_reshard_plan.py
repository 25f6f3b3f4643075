"""What holds of every plan: it does not depend on the order of sources, and fingerprints tell all that matters."""

import itertools
import sys

import pytest
from msgspec.structs import replace

from sglang_hetero.errors import CoverageError
from sglang_hetero.layout import AxisName, Role, Sharding, Side, wire
from sglang_hetero.reshard import Policy, bind, plan
from tests.reshard_oracle import model as m
from tests.reshard_oracle.handover import decode_rank, prefill_ranks
from tests.reshard_oracle.pair import (
    MODEL,
    SHAPE,
    decode,
    manifest,
    prefill,
    with_axis,
    with_component,
    with_segment,
)
from tests.reshard_oracle.rank import CHANNELS_FIRST, WINDOW_FIRST, Format, Shape

DRAFT = frozenset({Role.DRAFT_KEY, Role.DRAFT_VALUE})


def stages(tp=2, pp=2, model=MODEL):
    return [rank.manifest for rank in prefill_ranks(model, tp, SHAPE, stages=pp)]


def test_plan_does_not_depend_on_the_order_of_sources():
    sources, to = stages(), decode()
    wanted = plan(sources, to)
    assert [(s.coordinates.pp_rank, s.coordinates.tp_rank) for s in wanted.sources] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for order in itertools.permutations(sources):
        found = plan(order, to)
        assert found.sources == wanted.sources
        assert found.shares == wanted.shares
        assert found.fingerprint == wanted.fingerprint


def test_both_sides_plan_the_same_from_what_they_were_sent():
    sources, to = stages(), decode()
    theirs = plan([wire.decode(wire.encode(source)) for source in sources], wire.decode(wire.encode(to)))
    ours = plan(sources, to)
    assert ours == theirs
    for number in range(len(sources)):
        assert ours.fingerprint_of(number) == theirs.fingerprint_of(number)


@pytest.mark.parametrize("page_size", [1, 2, 128])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_manifest_survives_the_wire(page_size, tp):
    for rank in range(tp):
        whole = manifest(Side.PREFILL, rank, tp, shape=Shape(page_size=page_size))
        assert wire.decode(wire.encode(whole)) == whole


def moved(whole):
    """The same caches elsewhere: another process on another host, other pools of the same shape."""
    parts = tuple(
        replace(
            part, items=part.items + 5, item_stride=part.item_stride, addresses=tuple(a + 64 for a in part.addresses)
        )
        for part in whole.components
    )
    return replace(whole, host="elsewhere", incarnation="another start", components=parts)


def test_fingerprints_ignore_where_caches_lie():
    assert moved(decode()).fingerprint == decode().fingerprint
    apart = with_component(decode(), Role.CONV, item_stride=4096)
    assert apart.fingerprint == decode().fingerprint
    reordered = replace(decode(), components=tuple(reversed(decode().components)))
    assert reordered.fingerprint == decode().fingerprint
    elsewhere = plan([moved(source) for source in prefill()], moved(decode()))
    here = plan(prefill(), decode())
    assert elsewhere.fingerprint == here.fingerprint
    for number in (0, 1):
        assert elsewhere.fingerprint_of(number) == here.fingerprint_of(number)


def test_stride_of_a_single_element_is_of_no_meaning():
    one = decode(0, 8)
    odd = with_axis(one, Role.SSM, AxisName.HEAD, stride=400)
    assert odd != one and odd.fingerprint == one.fingerprint


@pytest.mark.parametrize("stride", [2, 6, 24, 400])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=["P2D1", "P1D2"])
def test_stride_of_a_single_token_is_of_no_meaning(tp, stride):
    """Pages of one token: torch may report any stride along that axis, and it may even seem to be the innermost."""
    p, d = tp
    page = Shape(page_size=1)
    sources = [with_axis(one, Role.TARGET_KEY, AxisName.TOKEN, stride=stride) for one in prefill(p, shape=page)]
    to = with_axis(decode(0, d, shape=page), Role.TARGET_KEY, AxisName.TOKEN, stride=stride)
    whole = plan(sources, to)
    sent = [
        piece.descriptors.nbytes
        for number in range(p)
        for piece in bind(whole, number, pages=[5, 2, 3], slot=1, tokens=3).pieces
        if piece.share.role is Role.TARGET_KEY
    ]
    assert sum(sent) == 2 * 3 * 4 // d * 3 * 2  # layers, tokens, heads, width, bytes


def regrouped(whole):
    """Conv with the same channels in heads of twice the width."""
    return with_segment(whole, Role.CONV, 0, heads=2, width=4)


MEANINGS = {
    "page_size": lambda w: decode(shape=Shape(page_size=3)),
    "model": lambda w: replace(w, model="another"),
    "sglang": lambda w: replace(w, sglang="0.5.22"),
    "tp_rank": lambda w: decode(1, 2),
    "tp_size": lambda w: decode(0, 2),
    "component": lambda w: replace(w, components=w.components[:-1]),
    "role": lambda w: replace(w, components=(*w.components[:-1], replace(w.components[-1], role=Role.TARGET_VALUE))),
    "dtype": lambda w: with_component(w, Role.TARGET_KEY, dtype="float16"),
    "layers": lambda w: with_component(w, Role.TARGET_KEY, layers=(1, 4)),
    "encoding": lambda w: with_component(w, Role.TARGET_KEY, encoding="nz"),
    "order of axes": lambda w: with_component(w, Role.CONV, axes=tuple(reversed(w.of(Role.CONV)[0].axes))),
    "axis size": lambda w: with_axis(w, Role.SSM, AxisName.STATE_COLUMN, size=2),
    "axis stride": lambda w: with_axis(
        with_component(w, Role.SSM, item_stride=400), Role.SSM, AxisName.HEAD, stride=28
    ),
    "live rows": lambda w: with_axis(w, Role.CONV, AxisName.WINDOW, live=(0, 2)),
    "first live row": lambda w: with_axis(w, Role.CONV, AxisName.WINDOW, live=(1, 2)),
    "segment name": lambda w: with_segment(w, Role.CONV, 0, name="Q"),
    "segment heads and width": regrouped,
    "segment sharding": lambda w: with_segment(w, Role.CONV, 0, sharding=Sharding.REPLICATED),
    "divided segment": lambda w: with_segment(w, Role.CONV, 0, sharding=Sharding.DIVIDED),
    "segment order": lambda w: with_axis(
        w, Role.CONV, AxisName.CHANNEL, segments=tuple(reversed(w.of(Role.CONV)[0].cut_axis.segments))
    ),
}


def test_fingerprint_of_a_manifest_changes_with_every_meaning():
    seen = {"as it is": decode().fingerprint}
    for name, change in MEANINGS.items():
        fingerprint = change(decode()).fingerprint
        twin = [other for other, value in seen.items() if value == fingerprint]
        assert not twin, f"{name} gives the fingerprint of {twin}"
        seen[name] = fingerprint


def fingerprint(*, p=2, d=1, rank=0, model=MODEL, source=SHAPE, to=SHAPE, policy=None, decode_model=None, pp=1):
    sources = [one.manifest for one in prefill_ranks(model, p, source, stages=pp)]
    destination = decode_rank(decode_model or model, d, rank, to).manifest
    return plan(sources, destination, policy or Policy()).fingerprint


def with_tensor(role, tensor):
    return tuple(tensor if one.role is role else one for one in MODEL)


PLANS = {
    "as it is": {},
    "prefill TP": {"p": 4},
    "decode TP": {"d": 2},
    "decode rank": {"d": 2, "rank": 1},
    "first part of one source": {"p": 1, "d": 2},
    "second part of one source": {"p": 1, "d": 2, "rank": 1},
    "stages": {"pp": 2},
    "source window first": {"source": Shape(formats={Role.CONV: WINDOW_FIRST})},
    "source order of heads": {"source": Shape(formats={Role.SSM: Format(order=(0, 2, 1))})},
    "page size": {"source": Shape(page_size=4), "to": Shape(page_size=4)},
    "dtype": {"model": with_tensor(Role.SSM, m.ssm(8, 2, 3, (0, 2), "float16"))},
    "layers": {"model": with_tensor(Role.SSM, m.ssm(8, 2, 3, (0, 4)))},
    "width": {"model": with_tensor(Role.SSM, m.ssm(8, 2, 4, (0, 2)))},
    "kernel": {"model": with_tensor(Role.CONV, m.conv(MODEL[2].segments, 5, (0, 2)))},
    "heads": {"model": with_tensor(Role.TARGET_KEY, m.heads_kv(Role.TARGET_KEY, 2, 3, (1, 3)))},
    "no draft": {"decode_model": m.without_draft(MODEL), "policy": Policy(drop=DRAFT)},
    "replicated segment": {
        "model": with_tensor(Role.CONV, m.conv((m.Segment("q", 4, 2, True), *MODEL[2].segments[1:]), 4, (0, 2)))
    },
}


def test_fingerprint_of_a_plan_changes_with_every_copy():
    seen = {}
    for name, world in PLANS.items():
        digest = fingerprint(**world)
        assert digest not in seen, f"{name} gives the fingerprint of {seen[digest]}"
        seen[digest] = name


def test_plan_is_proved_whatever_the_planner_did(monkeypatch):
    planner = sys.modules["sglang_hetero.reshard.plan"]
    blocks = planner._blocks

    def forgetful(*args, **options):
        found = blocks(*args, **options)
        return dict(list(found.items())[:-1])

    monkeypatch.setattr(planner, "_blocks", forgetful)
    with pytest.raises(CoverageError, match="have no writer"):
        plan(prefill(), decode())


def test_fingerprint_of_a_plan_tells_dtypes_of_one_size_apart():
    half = with_tensor(Role.SSM, m.ssm(8, 2, 3, (0, 2), "float16"))
    brain = with_tensor(Role.SSM, m.ssm(8, 2, 3, (0, 2), "bfloat16"))
    assert fingerprint(model=half) != fingerprint(model=brain)


def test_fingerprint_of_one_source_ignores_the_others():
    """A source and the destination need not know what the other sources send, only that they agree on its part."""
    first, second = prefill()
    whole = plan([first, second], decode())
    window_first = manifest(Side.PREFILL, 1, 2, shape=Shape(formats={Role.CONV: WINDOW_FIRST}))
    changed = plan([first, window_first], decode())
    assert changed.fingerprint_of(0) == whole.fingerprint_of(0)
    assert changed.fingerprint_of(1) != whole.fingerprint_of(1)
    assert changed.fingerprint != whole.fingerprint


def test_destination_strides_do_not_change_what_is_sent():
    """Staging is in the source's order, so that a source need not know how decode's pools lie."""
    to = Shape(formats={Role.CONV: WINDOW_FIRST, Role.SSM: Format(interleaved=True, item_gap=3)})
    assert fingerprint(to=to) == fingerprint(to=Shape(formats={Role.CONV: CHANNELS_FIRST}))
