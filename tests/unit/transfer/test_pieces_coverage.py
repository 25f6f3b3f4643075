"""Coverage is complete exactly when every page of every entry and every state has been merged once."""

import random

import pytest

from sglang_hetero.errors import ProtocolError
from sglang_hetero.layout import Coordinates, Role, Side
from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.geometry import HeadAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.reshard import Policy, plan
from sglang_hetero.transfer.pieces import Coverage, Piece, StageProgram, StateMode

OPTIONS = PoolOptions(page_size=4, pages=20, slots=2)
STATE = LinearAttention(tuple(Segment(name, 4, 3, Sharding.DIVIDED) for name in "qkv"), 4, 4, 2, 2)
HYBRID = ModelGeometry(HeadAttention(4, 2, 2), (1, 3), STATE, (0, 2), (0,))
KEY, VALUE, DRAFT_KEY, DRAFT_VALUE = Role.TARGET_KEY, Role.TARGET_VALUE, Role.DRAFT_KEY, Role.DRAFT_VALUE
PAGES = {KEY: 2, VALUE: 3, DRAFT_KEY: 8, DRAFT_VALUE: 8}
PAGED = [(KEY, 1), (VALUE, 1), (KEY, 3), (VALUE, 3), (DRAFT_KEY, 0), (DRAFT_VALUE, 0)]


def made(policy=None, *, draft=True):
    sources = [
        manifest(HYBRID, Side.PREFILL, Coordinates(tp_rank=rank, tp_size=2), OPTIONS, draft=draft) for rank in (0, 1)
    ]
    return plan(sources, manifest(HYBRID, Side.DECODE, Coordinates(), OPTIONS), policy or Policy())


@pytest.mark.parametrize("seed", range(40))
def test_complete_exactly_at_the_end(seed):
    """Any chunking, any order; whichever piece is left out last is what is missing."""
    draw = random.Random(seed)
    pages = draw.randint(1, 20)
    tokens = (pages - 1) * 4 + draw.randint(1, 4)
    cuts = sorted(draw.randint(0, pages - 1) for _ in range(draw.randint(0, 3)))
    pieces = list(StageProgram(made(), 0, PAGES, StateMode.PUSH).whole([*cuts, pages], tokens))
    draw.shuffle(pieces)
    coverage = Coverage(made(), pages, draw.choice([None, tokens]))
    for number, piece in enumerate(pieces):
        assert not coverage.complete
        coverage.add(piece)
        if number < len(pieces) - 1:
            with pytest.raises(ProtocolError):
                coverage.add(draw.choice(pieces[: number + 1]))
        if number == len(pieces) - 2:
            left = pieces[-1]
            last = left.first_page + left.pages - 1
            wanted = f"layer {left.layer} of {Role.CONV if left.role is None else left.role}"
            assert coverage.missing().startswith(
                wanted if left.role is None else f"pages {left.first_page} to {last} of {pages} of {wanted}"
            )
    assert coverage.complete and coverage.missing() == "" and coverage.tokens == tokens


def test_missing_names_the_first_hole():
    coverage = Coverage(made(), 5)
    assert coverage.missing() == "pages 0 to 4 of 5 of layer 1 of target_key and 9 more"
    coverage.add(Piece(KEY, 1, 0, 2, 8))
    coverage.add(Piece(KEY, 1, 3, 1, 4))
    assert coverage.missing() == "pages 2 to 2 of 5 of layer 1 of target_key and 9 more"
    for role, layer in PAGED[1:]:
        coverage.pulled(role, layer)
    coverage.add(Piece(None, 0))
    coverage.pulled(Role.CONV, 2)
    coverage.pulled(Role.SSM, 2)
    assert coverage.missing() == "pages 2 to 2 of 5 of layer 1 of target_key"
    coverage.add(Piece(KEY, 1, 2, 1, 4))
    assert coverage.missing() == "pages 4 to 4 of 5 of layer 1 of target_key" and coverage.tokens is None
    coverage.add(Piece(KEY, 1, 4, 1, 2))
    assert coverage.complete and coverage.tokens == 18


def test_what_nobody_sends_has_to_be_emptied():
    left_out = frozenset({DRAFT_KEY, DRAFT_VALUE})
    coverage = Coverage(made(Policy(start_empty=left_out), draft=False), 1, 4)
    for role, layer in PAGED[:4]:
        coverage.add(Piece(role, layer, 0, 1, 4))
    coverage.add(Piece(None, 0))
    coverage.add(Piece(None, 2))
    assert coverage.missing() == "pages 0 to 0 of 1 of layer 0 of draft_key and 1 more"
    coverage.emptied()
    assert coverage.complete
    with pytest.raises(ProtocolError, match="no such layer"):
        coverage.add(Piece(DRAFT_KEY, 0, 0, 1, 4))
    with pytest.raises(ProtocolError, match="emptied before"):
        coverage.emptied()


def test_what_is_sent_is_not_emptied():
    coverage = Coverage(made(), 1, 4)
    before = coverage.missing()
    coverage.emptied()
    assert coverage.missing() == before


@pytest.mark.parametrize(
    "piece",
    [
        Piece(KEY, 0, 0, 1, 4),
        Piece(Role.CONV, 0, 0, 1, 4),
        Piece(None, 1),
        Piece(KEY, 1, 4, 2, 8),
        Piece(KEY, 1, -1, 1, 4),
        Piece(KEY, 1, 0, 0, 0),
        Piece(KEY, 1, 0, 1, 3),  # ends within a page that is not the last
        Piece(KEY, 1, 0, 2, 4),
        Piece(KEY, 1, 4, 1, 3),  # fewer tokens than the request has
        Piece(KEY, 1, 4, 1, 0),
        Piece(KEY, 1, 4, 1, 5),
        Piece(KEY, 1, 1, 1, 4),  # there already
        Piece(KEY, 1, 0, 3, 12),
    ],
    ids=str,
)
def test_what_is_outside_counts_for_nothing(piece):
    coverage = Coverage(made(), 5, 18)
    coverage.add(Piece(KEY, 1, 1, 1, 4))
    before = coverage.missing()
    with pytest.raises(ProtocolError):
        coverage.add(piece)
    assert coverage.missing() == before
    coverage.add(Piece(KEY, 1, 0, 1, 4))
    coverage.add(Piece(KEY, 1, 2, 3, 10))
    assert coverage.missing().startswith("pages 0 to 4 of 5 of layer 3 of target_key")


def test_pieces_must_agree_on_the_last_page():
    """Sources that count the tokens differently: the end of a page would silently stay as it was."""
    coverage = Coverage(made(), 2)
    coverage.add(Piece(KEY, 1, 1, 1, 3))
    with pytest.raises(ProtocolError, match="has 2 tokens, must have 3"):
        coverage.add(Piece(VALUE, 1, 1, 1, 2))
    coverage.add(Piece(VALUE, 1, 0, 2, 7))


def test_reading_what_was_written_is_refused():
    coverage = Coverage(made(), 2)
    coverage.add(Piece(DRAFT_KEY, 0, 1, 1, 4))
    for role, layer in [(DRAFT_KEY, 0), (DRAFT_KEY, 1), (Role.SSM, 1)]:
        with pytest.raises(ProtocolError, match="was read"):
            coverage.pulled(role, layer)


@pytest.mark.parametrize(("pages", "tokens"), [(0, None), (0, 0), (2, 4), (2, 9)])
def test_tokens_must_end_in_the_last_page(pages, tokens):
    with pytest.raises(ProtocolError):
        Coverage(made(), pages, tokens)
