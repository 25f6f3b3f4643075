"""The sequence of a stage: its order, that chunks do not change what it covers, and what is no piece of it."""

from itertools import pairwise

import numpy as np
import pytest

from sglang_hetero.errors import BindError, ProtocolError
from sglang_hetero.layout import Coordinates, Role, Side
from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.geometry import HeadAttention, LatentAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.reshard import plan
from sglang_hetero.transfer.pieces import (
    COMPLETE,
    NOTHING,
    Mark,
    Piece,
    SourceSide,
    StageProgram,
    StateMode,
    layer_done,
    pulled,
)
from sglang_hetero.transfer.pieces.progress import Group

OPTIONS = PoolOptions(page_size=4, pages=20, slots=2)
STATE = LinearAttention(tuple(Segment(name, 4, 3, Sharding.DIVIDED) for name in "qkv"), 4, 4, 2, 2)
HYBRID = ModelGeometry(HeadAttention(4, 2, 2), (1, 3), STATE, (0, 2), (0,))
PARALLEL = ModelGeometry(HeadAttention(4, 2, 2), (0, 1), STATE, (0, 1))
"""Both kinds in every layer, as Falcon-H1."""
KEY, VALUE, DRAFT_KEY, DRAFT_VALUE = Role.TARGET_KEY, Role.TARGET_VALUE, Role.DRAFT_KEY, Role.DRAFT_VALUE
PAGES = {KEY: 2, VALUE: 3, DRAFT_KEY: 8, DRAFT_VALUE: 8}


def made(geometry, prefill, decode=1, stages=1):
    sources = [
        manifest(
            geometry,
            Side.PREFILL,
            Coordinates(tp_rank=rank, tp_size=prefill, pp_rank=stage, pp_size=stages),
            OPTIONS,
        )
        for stage in range(stages)
        for rank in range(prefill)
    ]
    return plan(sources, manifest(geometry, Side.DECODE, Coordinates(tp_size=decode), OPTIONS))


def program(geometry=HYBRID, *, stages=1, stage=0, pages=PAGES, mode=StateMode.PREPUSH):
    return StageProgram(made(geometry, 2, 1, stages), stage, pages, mode)


def test_order_of_a_chunk():
    """Layer by layer, keys before values, state with the last chunk only, the draft behind everything."""
    first = program().chunk(0, 3, 12, last=False)
    assert first == (
        Piece(KEY, 1, 0, 2, 8),
        Piece(KEY, 1, 2, 1, 4),
        Piece(VALUE, 1, 0, 3, 12),
        Piece(KEY, 3, 0, 2, 8),
        Piece(KEY, 3, 2, 1, 4),
        Piece(VALUE, 3, 0, 3, 12),
        Piece(DRAFT_KEY, 0, 0, 3, 12),
        Piece(DRAFT_VALUE, 0, 0, 3, 12),
    )
    last = program().chunk(3, 2, 5, last=True)
    assert last == (
        Piece(None, 0),
        Piece(KEY, 1, 3, 2, 5),
        Piece(VALUE, 1, 3, 2, 5),
        Piece(None, 2),
        Piece(KEY, 3, 3, 2, 5),
        Piece(VALUE, 3, 3, 2, 5),
        Piece(DRAFT_KEY, 0, 3, 2, 5),
        Piece(DRAFT_VALUE, 0, 3, 2, 5),
    )
    assert program().whole([3, 5], 17) == first + last
    assert program().chunk(5, 0, 0, last=True) == (Piece(None, 0), Piece(None, 2))
    assert program().chunk(5, 0, 0, last=False) == ()


def test_attention_and_state_in_one_layer():
    pieces = program(PARALLEL).chunk(0, 1, 3, last=True)
    assert [piece.entry for piece in pieces] == [(r, layer) for layer in (0, 1) for r in (KEY, VALUE, None)]


def test_latent_roles_and_models_without_state():
    latent = ModelGeometry(LatentAttention(4, 2), (0, 1), None, ())
    found = StageProgram(made(latent, 2), 0, {Role.TARGET_LATENT: 1}, StateMode.PULL)
    assert found.whole([2], 5) == tuple(
        Piece(Role.TARGET_LATENT, layer, page, 1, 4 - 3 * page) for layer in (0, 1) for page in (0, 1)
    )
    assert found.reads(5) == ()


def test_modes():
    """Push has the state behind attention. Pull leaves out state and draft, which decode then reads."""
    sequence = program().whole([3, 5], 17)
    pushed = program(mode=StateMode.PUSH).whole([3, 5], 17)
    assert sorted(map(str, pushed)) == sorted(map(str, sequence))
    assert [piece.entry for piece in pushed[-5:]] == [
        (VALUE, 3),
        (None, 0),
        (None, 2),
        (DRAFT_KEY, 0),
        (DRAFT_VALUE, 0),
    ]
    pull = program(mode=StateMode.PULL)
    left = tuple(piece for piece in sequence if piece.role in (KEY, VALUE))
    assert pull.whole([3, 5], 17) == left
    assert pull.reads(17) == (
        Piece(None, 0),
        Piece(None, 2),
        Piece(DRAFT_KEY, 0, 0, 5, 17),
        Piece(DRAFT_VALUE, 0, 0, 5, 17),
    )
    assert program().reads(17) == ()
    for piece in pull.reads(17):
        with pytest.raises(ProtocolError, match="reads it itself"):
            pull.sharers(piece, 5)


MARKS = [
    layer_done(0),
    layer_done(1),
    layer_done(2),
    layer_done(3),
    Mark(Group.STATE, 0),
    Mark(Group.DRAFT, 0),
    COMPLETE,
]


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("geometry", [HYBRID, PARALLEL])
def test_the_parts_of_a_chunk_are_the_chunk(geometry, last, mode):
    """However a forward pass is noticed, in every selection of its marks, backwards ones among them."""
    of = program(geometry, mode=mode)
    whole = of.chunk(3, 2, 8, last=last)
    for chosen in range(1 << len(MARKS)):
        marks = [mark for number, mark in enumerate(MARKS) if chosen >> number & 1]
        marks = [*marks, *marks[:1], COMPLETE, COMPLETE]
        found, start = [], 0
        for mark in marks:
            pieces, start = of.part(3, 2, 8, last=last, start=start, upto=mark)
            found += pieces
        assert tuple(found) == whole


def test_a_part_has_nothing_that_was_not_reached():
    def after(mark, *, mode=StateMode.PREPUSH, last=True):
        pieces, _ = program(mode=mode).part(0, 2, 8, last=last, start=0, upto=mark)
        return [piece.entry for piece in pieces]

    assert after(NOTHING) == []
    assert after(layer_done(0)) == [(None, 0)]
    assert after(layer_done(0), last=False) == after(layer_done(0), mode=StateMode.PUSH) == []
    assert after(layer_done(1)) == [(None, 0), (KEY, 1), (VALUE, 1)]
    assert after(layer_done(2), last=False) == [(KEY, 1), (VALUE, 1)]
    assert after(layer_done(9)) == [(None, 0), (KEY, 1), (VALUE, 1), (None, 2), (KEY, 3), (VALUE, 3)]
    assert after(layer_done(9), mode=StateMode.PUSH) == [(KEY, 1), (VALUE, 1), (KEY, 3), (VALUE, 3)]
    assert after(COMPLETE)[-2:] == [(DRAFT_KEY, 0), (DRAFT_VALUE, 0)]


def test_what_is_pulled():
    whole_heads = made(HYBRID, 2)
    states = [(role, layer) for role in (Role.CONV, Role.SSM) for layer in (0, 2)]
    assert sorted(pulled(whole_heads)) == sorted([*states, (DRAFT_KEY, 0), (DRAFT_VALUE, 0)])
    # With fewer prefill ranks the draft's heads have to be gathered, so that there is nothing to read.
    assert sorted(pulled(made(HYBRID, 1, 2))) == sorted(states)


def test_stages_share_nothing():
    parts = [program(stages=2, stage=stage) for stage in (0, 1)]
    assert [part.sources for part in parts] == [(0, 1), (2, 3)]
    sequences = [part.whole([2], 8) for part in parts]
    assert {piece.layer for piece in sequences[0]} == {0, 1}
    assert {piece.layer for piece in sequences[1] if piece.role not in (DRAFT_KEY, DRAFT_VALUE)} == {2, 3}
    for part, other in (parts, sequences[1]), (parts[::-1], sequences[0]):
        for piece in other:
            with pytest.raises(ProtocolError, match="holds no"):
                part[0].sharers(piece)
    with pytest.raises(ProtocolError, match="no stage 2"):
        program(stages=2, stage=2)


@pytest.mark.parametrize("mode", StateMode)
@pytest.mark.parametrize("chunks", [[5], [1, 5], [2, 4, 5], [1, 2, 3, 4, 5], [0, 3, 3, 5], [5, 5]], ids=str)
def test_every_chunking_covers_every_page_once(chunks, mode):
    for tokens in (20,) if chunks == [5, 5] else (17, 20):
        part = program(mode=mode)
        pieces = part.whole(chunks, tokens)
        assert part.total(chunks, tokens) == len(pieces)
        seen = {}
        for piece in (*pieces, *part.reads(tokens)):
            for page in range(piece.first_page, piece.first_page + piece.pages) if piece.role else [0]:
                seen[piece.entry, page] = seen.get((piece.entry, page), 0) + 1
        paged = [(role, layer) for role in (KEY, VALUE) for layer in (1, 3)] + [(DRAFT_KEY, 0), (DRAFT_VALUE, 0)]
        wanted = {(entry, page) for entry in paged for page in range(5)} | {((None, layer), 0) for layer in (0, 2)}
        assert seen == dict.fromkeys(wanted, 1)
        for entry in paged:
            ends = [p.tokens for p in pieces if p.entry == entry]
            assert sum(ends) in (tokens, 0)
        for before, after in pairwise([p.first_page for p in pieces if p.entry == (KEY, 1)]):
            assert before < after


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [([], 4), ([4], 17), ([6], 17), ([3, 2, 5], 17), ([5, 5], 17), ([7, 5], 17), ([-1, 5], 17), ([0], 0), ([0], -3)],
)
def test_chunks_that_are_no_request(chunks, tokens):
    for call in (program().whole, program().total):
        with pytest.raises(ProtocolError):
            call(chunks, tokens)


@pytest.mark.parametrize("args", [(0, 2, 9), (0, 2, 4), (-1, 1, 4), (0, -1, 4), (0, 0, 1), (0, 1, 0)])
def test_chunks_that_are_no_run_of_pages(args):
    with pytest.raises(ProtocolError):
        program().chunk(*args, last=True)


def test_only_the_last_chunk_ends_within_a_page():
    with pytest.raises(ProtocolError, match="are full"):
        program().chunk(0, 2, 7, last=False)


NO_PIECES = [
    Piece(KEY, 0, 0, 1, 4),  # a linear layer
    Piece(KEY, 9, 0, 1, 4),
    Piece(Role.TARGET_LATENT, 1, 0, 1, 4),
    Piece(Role.CONV, 0),  # state has no role
    Piece(None, 1),
    Piece(None, 0, 0, 1, 4),
    Piece(None, 0, 1, 0, 0),
    Piece(KEY, 1, 0, 3, 12),  # more pages than decode said
    Piece(KEY, 1, 0, 0, 0),
    Piece(KEY, 1, 0, -1, 4),
    Piece(KEY, 1, -1, 1, 4),
    Piece(KEY, 1, 0, 1, 3),  # not full, and not the request's last page
    Piece(KEY, 1, 4, 1, 5),
    Piece(KEY, 1, 4, 1, 0),
    Piece(KEY, 1, 4, 2, 8),  # beyond the last page
    Piece(KEY, 1, 1 << 70, 1, 4),
    Piece(KEY, 1 << 70, 0, 1, 4),
]


@pytest.mark.parametrize("piece", NO_PIECES, ids=lambda piece: "-".join(map(str, piece.to_wire())))
def test_what_a_peer_says_is_checked(piece):
    with pytest.raises(ProtocolError):
        program().sharers(piece, 5)


@pytest.mark.parametrize("pages", [{}, {KEY: 2}, PAGES | {VALUE: 0}, PAGES | {DRAFT_KEY: -1}], ids=str)
def test_pages_per_piece_are_checked(pages):
    with pytest.raises(ProtocolError, match="pages per piece"):
        program(pages=pages)


def test_pieces_on_the_wire():
    for piece in (Piece(None, 2), Piece(KEY, 1, 4, 1, 3)):
        assert Piece.from_wire(*piece.to_wire()) == piece
        assert all(type(value) in (str, int) for value in piece.to_wire())
    with pytest.raises(ProtocolError, match="does not exist"):
        Piece.from_wire("target_keys", 1, 0, 1, 4)


def test_sharers_are_those_with_a_part():
    """Eight ranks of four heads: two hold each of them, and take turns."""
    four = ModelGeometry(HeadAttention(4, 2, 2), (0, 1), None, ())
    replicas = made(four, 8)
    part = StageProgram(replicas, 0, PAGES, StateMode.PREPUSH)
    sides = [SourceSide(replicas, number) for number in range(8)]
    sharers = {part.sharers(piece) for piece in part.whole([1], 4)}
    assert len(sharers) == 2 and all(len(one) == 4 for one in sharers)
    for piece in part.whole([1], 4):
        assert part.sharers(piece) == {side.source for side in sides if side.parts(piece)}
        for side in sides:
            assert bool(side.descriptors(piece, np.arange(1, 2), 0)) == (side.source in part.sharers(piece))


def test_state_parts_follow_each_other():
    side = SourceSide(made(HYBRID, 2), 0)
    conv, ssm = side.parts(Piece(None, 0))
    assert (conv.share.role, conv.offset, ssm.share.role) == (Role.CONV, 0, Role.SSM)
    assert conv.share.staged_bytes <= ssm.offset < conv.share.staged_bytes + 64 and ssm.offset % 64 == 0
    moves = side.descriptors(Piece(None, 0), np.zeros(0, dtype=np.int64), 1)
    assert [int(one.staged[0]) for _, one in moves] == [0, ssm.offset]
    assert side.state_bytes == ssm.offset + ssm.share.staged_bytes


def test_pages_that_are_not_known_yet():
    with pytest.raises(BindError, match="only 2 pages"):
        SourceSide(made(HYBRID, 2), 0).descriptors(Piece(KEY, 1, 2, 1, 4), np.arange(1, 3), 1)
