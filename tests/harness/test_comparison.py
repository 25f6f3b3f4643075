"""The comparison can fail: every kind of wrong byte is reported, at its place."""

from collections.abc import Iterator

import pytest

from . import Component, Difference, Geometry, Handoff, Harness, Leftovers, Pair, Result

GEOMETRY = Geometry()
TOKENS = 100
SEED = 7
FLIP = 0x40


@pytest.fixture(scope="module")
def pair(harness: Harness) -> Iterator[Pair]:
    with harness.pair(GEOMETRY, prefill_tp=1, decode_tp=1) as running:
        yield running


def handoff_with_flip(
    pair: Pair, component: Component, layer: int, inside: tuple[int, ...], *, foreign: bool = False
) -> Difference:
    """The one difference after one bit was flipped at `inside`, in the request's first item or in one of no request."""
    touched: list[tuple[int, ...]] = []

    def flip(pair: Pair, result: Result) -> None:
        owned = result.decode[0].items(component)
        item = next(index for index in range(GEOMETRY.slots) if index not in owned) if foreign else owned[0]
        touched.append((item, *inside))
        pair.decode[0].call("poke", component, layer, touched[0], FLIP)

    result = pair.handoff_many([Handoff(TOKENS, seed=SEED)], before_compare=flip)
    assert result.succeeded
    assert [difference.coordinates for difference in result.differences] == touched
    return result.differences[0]


@pytest.mark.parametrize(
    ("component", "layer", "inside"),
    [
        (Component.KEY, 1, (63, 3, 7)),
        (Component.VALUE, 3, (0, 0, 0)),
        (Component.DRAFT_KEY, 0, (5, 1, 2)),
        (Component.DRAFT_VALUE, 0, (5, 1, 2)),
        (Component.CONV, 0, (63, 2)),
        (Component.SSM, 2, (7, 3, 3)),
    ],
    ids=lambda value: value.name if isinstance(value, Component) else None,
)
def test_a_flipped_bit_is_reported_at_its_place(
    pair: Pair, component: Component, layer: int, inside: tuple[int, ...]
) -> None:
    difference = handoff_with_flip(pair, component, layer, inside)
    assert (difference.component, difference.layer, difference.elements) == (component, layer, 1)
    assert difference.expected ^ difference.actual == FLIP
    assert difference.foreign_items == ()
    assert f"layer {layer}: first difference at" in str(difference)


@pytest.mark.parametrize(
    ("component", "inside"), [(Component.KEY, (0, 0, 0)), (Component.CONV, (0, 0)), (Component.SSM, (0, 0, 0))]
)
def test_lost_poison_is_reported_as_foreign(pair: Pair, component: Component, inside: tuple[int, ...]) -> None:
    layer = 1 if component is Component.KEY else 0
    difference = handoff_with_flip(pair, component, layer, inside, foreign=True)
    assert difference.foreign_items == (difference.coordinates[0],)
    poison = (1 << 8 * difference.itemsize) - 1
    assert difference.expected == poison
    assert difference.actual == poison ^ FLIP


def test_the_page_tail_is_compared(pair: Pair) -> None:
    result = pair.handoff(TOKENS, seed=SEED, leftovers=Leftovers.UNTOUCHED)
    assert {difference.component for difference in result.differences} == {
        Component.KEY,
        Component.VALUE,
        Component.DRAFT_KEY,
        Component.DRAFT_VALUE,
    }
    last_page = result.decode[0].pages[-1]
    for difference in result.differences:
        assert difference.items == (last_page,)
        assert difference.coordinates == (last_page, TOKENS % GEOMETRY.page_size, 0, 0)


def test_a_missing_transfer_is_reported_for_every_buffer_with_a_state(pair: Pair) -> None:
    def poison_again(pair: Pair, _: Result) -> None:
        pair.decode[0].call("poison")

    result = pair.handoff_many([Handoff(TOKENS, seed=SEED)], before_compare=poison_again)
    assert {difference.component for difference in result.differences} == set(Component)
    key = next(difference for difference in result.differences if difference.component is Component.KEY)
    pages = -(-TOKENS // GEOMETRY.page_size)
    per_page = GEOMETRY.page_size * GEOMETRY.kv_heads * GEOMETRY.head_dim
    assert key.elements == pages * per_page, "the tail of the last page included"
