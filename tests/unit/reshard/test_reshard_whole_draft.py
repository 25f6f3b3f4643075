"""A draft whose heads are all on every rank of one side or both, while the target is sharded: bytes, writers, refusals.

The seed's "draft body TP1". SGLang 0.5.23 has no switch for it (docs/core.md).
"""

import dataclasses
from collections import Counter
from functools import partial

import pytest
from msgspec.structs import replace

from sglang_hetero.errors import CoverageError, LayoutMismatch
from sglang_hetero.layout import AxisName, Role, Segment, Sharding, wire
from sglang_hetero.layout.geometry import HeadAttention
from sglang_hetero.reshard import Block, bind, plan
from sglang_hetero.reshard.coverage import prove
from sglang_hetero.reshard.explain import Request as Explained
from sglang_hetero.reshard.explain import explain
from tests.reshard_oracle import model as m
from tests.reshard_oracle.handover import Request, decode_rank, prefill_ranks, serve
from tests.reshard_oracle.pair import MODEL, SHAPE, decode, prefill, with_segment
from tests.reshard_oracle.rank import Format, Shape

WHOLE = m.with_whole_draft(MODEL)
DRAFT = (Role.DRAFT_KEY, Role.DRAFT_VALUE)
LAYERS = (0, 1, 2)
"""Of the draft: so many that replicas have their turns."""


def model(heads, layers=LAYERS):
    """Keys and values of different widths, and a draft of several layers."""
    return (
        m.heads_kv(Role.TARGET_KEY, heads, 3, (0, 1)),
        m.heads_kv(Role.TARGET_VALUE, heads, 2, (0, 1)),
        m.heads_kv(Role.DRAFT_KEY, heads, 3, layers),
        m.heads_kv(Role.DRAFT_VALUE, heads, 2, layers),
    )


def sides(heads, whole):
    """The model as prefill and as decode have it; whole: on which of the two every rank has the whole draft."""
    return [m.with_whole_draft(model(heads)) if side else model(heads) for side in whole]


def plans(heads, p, d, whole):
    """The plan of every decode rank."""
    theirs, ours = sides(heads, whole)
    sources = [rank.manifest for rank in prefill_ranks(theirs, p, SHAPE)]
    return [plan(sources, decode_rank(ours, d, rank, SHAPE).manifest) for rank in range(d)]


# --- bytes

PREFILL, DECODE, BOTH = (True, False), (False, True), (True, True)
WORLDS = {
    "P2 whole, D1": (2, 2, 1, PREFILL),
    "P4 whole, D2": (4, 4, 2, PREFILL),
    "P2, D2 whole": (4, 2, 2, DECODE),
    "P1, D2 whole": (4, 1, 2, DECODE),
    "P2 whole, D2 whole": (4, 2, 2, BOTH),
    "P2 whole, D2": (4, 2, 2, PREFILL),
    "P4 whole, D2 whole": (4, 4, 2, BOTH),
    "P3 whole, D2, 6 heads": (6, 3, 2, PREFILL),
    "P3, D2 whole, 6 heads": (6, 3, 2, DECODE),
    "P2 whole, D3, 6 heads": (6, 2, 3, PREFILL),
    "P2, D3 whole, 6 heads": (6, 2, 3, DECODE),
    "P4 whole, D2, fewer heads than ranks": (2, 4, 2, PREFILL),
    "P4, D2 whole, fewer heads than ranks": (2, 4, 2, DECODE),
    "P2 whole, D4, fewer heads than ranks": (2, 2, 4, PREFILL),
    "P8, D4 whole, one head": (1, 8, 4, DECODE),
}


@pytest.mark.parametrize("form", [Format(), Format(interleaved=True, item_gap=3, row_gap=1), Format(order=(0, 2, 1))])
@pytest.mark.parametrize("tokens", [5, 8])
@pytest.mark.parametrize("world", WORLDS)
def test_bytes(world, tokens, form):
    """Every byte of every decode rank: poison, neighbours and tails included; prefill in two chunks."""
    heads, p, d, whole = WORLDS[world]
    theirs, ours = sides(heads, whole)
    shape = Shape(page_size=4, pages=5, formats=dict.fromkeys(DRAFT, form))
    plain = Shape(page_size=4, pages=5)
    request = Request(tokens, (range(1), range(1, 2)))
    for shapes in ((shape, plain), (plain, shape)):
        serve(theirs, (p, shapes[0]), (d, shapes[1]), request, decode_model=ours)


@pytest.mark.parametrize("whole", [PREFILL, DECODE, BOTH], ids=["prefill", "decode", "both"])
@pytest.mark.parametrize("stages", [1, 2])
def test_beside_linear_state_and_stages(whole, stages):
    theirs, ours = (WHOLE if side else MODEL for side in whole)
    for p, d in ((2, 1), (4, 2), (2, 4), (1, 2)):
        serve(theirs, (p, SHAPE), (d, SHAPE), Request(3), stages=stages, decode_model=ours)


# --- who sends


@pytest.mark.parametrize(("p", "d"), [(2, 1), (4, 1), (4, 2), (8, 2), (3, 2), (2, 3), (2, 2), (3, 1)])
def test_a_rank_that_has_all_of_an_entry_sends_all_of_it(p, d):
    """One source for each layer's K and each layer's V, in turns, so that their links share the load."""
    heads = 24
    for rank, made in enumerate(plans(heads, p, d, PREFILL)):
        shares = [share for share in made.shares if share.role.draft]
        entries = Counter((share.role, layer) for share in shares for layer in share.layers)
        assert entries == {(role, layer): 1 for role in DRAFT for layer in LAYERS}
        wanted = heads // d
        assert {share.blocks for share in shares} == {(Block(rank * wanted, 0, wanted),)}
        load = Counter(share.source for share in shares for _ in share.layers)
        if p == d:
            assert set(load) == {rank}
        else:
            assert len(load) == min(p, 2 * len(LAYERS)) and max(load.values()) - min(load.values()) <= 1


@pytest.mark.parametrize("whole", [PREFILL, BOTH], ids=["prefill", "both"])
def test_decode_ranks_do_not_ask_the_same_one(whole):
    """For each layer's K and each layer's V."""

    def writers(made):
        return {(share.role, layer): share.source for share in made.shares for layer in share.layers}

    first, second = (writers(made) for made in plans(4, 4, 2, whole))
    assert all(first[role, layer] != second[role, layer] for role in DRAFT for layer in LAYERS)


@pytest.mark.parametrize("whole", [PREFILL, BOTH], ids=["prefill", "both"])
def test_a_whole_copy_goes_over_as_it_lies(whole):
    """P2 to D1: nothing is gathered, and each page is one descriptor; sharded draft heads have two."""
    (made,) = plans(2, 2, 1, whole)
    pieces = [bind(made, source, pages=[2, 4], slot=1, tokens=4).pieces for source in (0, 1)]
    draft = [piece for own in pieces for piece in own if piece.share.role.draft]
    assert len(draft) == 2 * len(LAYERS) and not any(piece.descriptors.packed for piece in draft)
    assert sum(len(piece.descriptors) for piece in draft) == 2 * 2 * len(LAYERS)
    assert sum(piece.descriptors.nbytes for piece in draft) == 4 * len(LAYERS) * 2 * (3 + 2) * 2


# --- descriptions and fingerprints


def test_where_a_share_is_all_heads_there_is_one_description():
    by_head, whole = (Segment("kv", 4, 1),), (Segment("kv", 4, 1, Sharding.REPLICATED),)
    attention = HeadAttention(4, 3, 2)
    assert [attention.whole_segments(tp) for tp in (1, 2, 4, 8)] == [by_head, whole, whole, whole]
    single = HeadAttention(1, 3, 2)
    assert {single.whole_segments(tp) for tp in (1, 2, 8)} == {single.segments}


@pytest.mark.parametrize("whole", [PREFILL, DECODE, BOTH], ids=["prefill", "decode", "both"])
def test_both_sides_come_to_the_same(whole):
    theirs, ours = (WHOLE if side else MODEL for side in whole)
    sources, to = prefill(4, model=theirs), decode(1, 2, model=ours)
    here = plan(sources, to)
    there = plan([wire.decode(wire.encode(source)) for source in reversed(sources)], wire.decode(wire.encode(to)))
    assert here == there and here.fingerprint == there.fingerprint
    assert [here.fingerprint_of(number) for number in range(4)] == [there.fingerprint_of(number) for number in range(4)]


def test_fingerprints_tell_a_whole_draft_from_a_sharded_one():
    """Those of plans for rank 1; rank 0 begins with the same heads either way, so that the copies may be the same."""
    assert len({decode(1, 2, model=one).fingerprint for one in (MODEL, WHOLE)}) == 2
    worlds = [(MODEL, MODEL), (WHOLE, MODEL), (MODEL, WHOLE), (WHOLE, WHOLE)]
    found = {plan(prefill(2, model=theirs), decode(1, 2, model=ours)).fingerprint for theirs, ours in worlds}
    assert len(found) == len(worlds)


# --- refusals

P0, P1, D0 = r"prefill TP0/2 \(prefill-host\)", r"prefill TP1/2 \(prefill-host\)", r"decode TP0/2 \(decode-host\)"


@pytest.mark.parametrize("role", [Role.TARGET_KEY, Role.TARGET_VALUE])
@pytest.mark.parametrize("on_prefill", [True, False], ids=["prefill", "decode"])
def test_rejects_a_target_that_is_whole_on_one_side(role, on_prefill):
    name = AxisName.HEAD
    whole = [with_segment(rank, role, 0, sharding=Sharding.REPLICATED) for rank in (*prefill(1), decode())]
    sources, to = (whole[:1], decode()) if on_prefill else (prefill(1), whole[1])
    left, right = ("replicated", "by head") if on_prefill else ("by head", "replicated")
    words = (
        rf"{role}: prefill TP0/1 \(prefill-host\) has axis {name} with segments kv 4 x 1 {left}, decode TP0/1 "
        rf"\(decode-host\) kv 4 x 1 {right}; only a draft's heads may be whole on every rank of one side and sharded "
        "on the other; start both with the same parallel settings"
    )
    with pytest.raises(LayoutMismatch, match=words):
        plan(sources, to)


def test_rejects_a_whole_draft_of_another_model():
    """The content is compared by head, whoever has it: six heads are not four, nor is another segment."""
    six = tuple(tensor for tensor in WHOLE if not tensor.role.draft) + tuple(
        m.with_whole_draft((m.heads_kv(role, 6, 3, (0,)),))[0] for role in DRAFT
    )
    words = rf"draft_key: {P0} has axis head with segments kv 6 x 1 replicated, {D0} kv 4 x 1 by head; start both with"
    with pytest.raises(LayoutMismatch, match=words + " the same checkpoint"):
        plan(prefill(2, model=six), decode(0, 2))
    for change in ({"name": "other"}, {"sharding": Sharding.DIVIDED}):
        other = with_segment(decode(0, 2), Role.DRAFT_KEY, 0, **change)
        with pytest.raises(LayoutMismatch, match=f"draft_key: {P0} has axis head .*{D0} .*same checkpoint"):
            plan(prefill(2, model=WHOLE), other)


def test_rejects_ranks_of_one_server_that_differ():
    sources = [prefill(2, model=WHOLE)[0], prefill(2, model=MODEL)[1]]
    words = (
        f"draft_key: {P0} has axis head with segments kv 4 x 1 replicated, {P1} kv 4 x 1 by head: .*{D0} cannot know "
        "who has what; restart the prefill server"
    )
    for order in (sources, sources[::-1]):
        with pytest.raises(LayoutMismatch, match=words):
            plan(order, decode(0, 2))


def test_layers_of_one_role_may_differ():
    """Nobody's pools do that, but a manifest may say it, and then each layer goes by its own description."""

    def of_layer(rank, layer):
        (part,) = rank.of(Role.DRAFT_KEY)
        return replace(part, layers=(layer,), addresses=(part.address(layer),))

    sharded = (m.heads_kv(Role.DRAFT_KEY, 4, 3, (0, 1)),)
    pairs = zip(prefill(2, model=m.with_whole_draft(sharded)), prefill(2, model=sharded), strict=True)
    sources = [replace(whole, components=(of_layer(whole, 0), of_layer(half, 1))) for whole, half in pairs]
    made = plan(sources, decode(model=sharded))
    writers = {layer: sorted(share.source for share in made.shares if layer in share.layers) for layer in (0, 1)}
    assert writers == {0: [0], 1: [0, 1]}


def test_the_proof_goes_by_each_sides_own_heads():
    """Another half than the one that is wanted, half of that, or the same from both ranks."""
    sources, to = prefill(2, model=WHOLE), decode(0, 2)
    made = plan(sources, to)
    (good,) = [share for share in made.shares if share.role is Role.DRAFT_KEY]
    others = [share for share in made.shares if share is not good]
    proved = partial(prove, made.sources, to, missing=frozenset())
    proved([good, *others])
    with pytest.raises(CoverageError, match="elements 2 to 3 of the source are not elements 0 to 1 of the dest"):
        proved([dataclasses.replace(good, blocks=(Block(2, 0, 2),)), *others])
    with pytest.raises(CoverageError, match="elements 1 to 1 of axis head have no writer"):
        proved([dataclasses.replace(good, blocks=(Block(0, 0, 1),)), *others])
    again = dataclasses.replace(good, source=1, source_component=sources[1].of(Role.DRAFT_KEY)[0])
    with pytest.raises(CoverageError, match="elements 0 to 1 of axis head have two writers"):
        proved([good, again, *others])


# --- explain


def test_explain_says_who_sends_the_draft():
    """P2 to D1: of the draft K and V each come whole from one rank, nothing is gathered, nothing sent twice."""
    (made,) = plans(2, 2, 1, PREFILL)
    found = explain([made], Explained(pages=[1, 2], slot=1, tokens=4, chunks=(range(2),)))
    parts = [(source.rank, part) for source in found.sources for route in source.to for part in route.parts]
    draft = [(rank, part) for rank, part in parts if part.role.startswith("draft")]
    entries = Counter((part.role, layer) for _, part in draft for layer in part.layers)
    assert entries == {(str(role), layer): 1 for role in DRAFT for layer in LAYERS}
    assert {part.blocks for _, part in draft} == {((0, 0, 2),)}
    assert {rank for rank, _ in draft} == {0, 1} and not any(part.packed for _, part in draft)
    layers = 2 + len(LAYERS)
    assert sum(source.bytes for source in found.sources) == layers * 4 * 2 * (3 + 2) * 2  # tokens, heads, widths, bytes
    assert all(route.staged for source in found.sources for route in source.to)


@pytest.mark.parametrize(("whole", "staged"), [(BOTH, False), (PREFILL, True), (DECODE, True)])
def test_equal_sizes_are_byte_compatible_only_if_both_keep_it_whole(whole, staged):
    made = plans(2, 2, 2, whole)
    found = explain(made, Explained(pages=[1], slot=1, tokens=2, chunks=(range(1),)))
    assert {route.staged for source in found.sources for route in source.to} == {staged}
