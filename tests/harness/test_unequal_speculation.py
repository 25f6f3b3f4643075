"""Prefill and decode with different speculation: every byte of every decode pool, in both conv layouts.

What differs: rows of a window-first conv slot, the draft's caches, and the columns of the aux row that the draft begins
with. Draft tokens are the depth and one.
"""

from dataclasses import replace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Abort, Forward, Geometry, Handoff, Harness, Leftovers, On
from .product import (
    OFF,
    PULL,
    PUSH,
    SCARCE,
    SIXES,
    STOCK,
    VERIFY,
    around_pages,
    check,
    check_all_is_back,
    check_ours,
    geometry,
)

OFF_DEPTH, DEPTH_1, DEPTH_3, DEPTH_5 = 0, 2, 4, 6
"""Draft tokens."""
DEPTHS = [(OFF_DEPTH, DEPTH_3), (DEPTH_1, DEPTH_5), (DEPTH_5, DEPTH_1), (DEPTH_3, OFF_DEPTH)]
SIZES = [(2, 1), (1, 2), (2, 2)]
IDS = {OFF_DEPTH: "none", DEPTH_1: "1", DEPTH_3: "3", DEPTH_5: "5"}


def sides(layout: ConvLayout, prefill: int, decode: int, page: int = 64) -> tuple[Geometry, Geometry]:
    """One model, served with these numbers of draft tokens. The hidden row is wider than without a draft."""
    both = geometry(page, conv_layout=layout, hidden_size=48)
    return replace(both, draft_tokens=prefill), replace(both, draft_tokens=decode)


@pytest.mark.parametrize("layout", ConvLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize("depths", DEPTHS, ids=lambda pair: f"P-{IDS[pair[0]]}-D-{IDS[pair[1]]}")
@pytest.mark.parametrize("sizes", SIZES, ids=lambda pair: f"P{pair[0]}D{pair[1]}")
def test_every_byte_arrives_and_no_other_is_written(
    harness: Harness, sizes: tuple[int, int], depths: tuple[int, int], layout: ConvLayout
) -> None:
    """With equal TP sizes, too, and without SGLANG_HETERO=always: SGLang's own path fails there, or overwrites others.

    The only such pair with equal bytes is one that differs in depth alone, with channels-first slots: SGLang's path.
    """
    theirs, ours = sides(layout, *depths)
    stock = sizes[0] == sizes[1] and all(depths) and layout is ConvLayout.CHANNELS_FIRST
    leftovers = Leftovers.COPIED if stock else Leftovers.UNTOUCHED
    modes = [PUSH, PULL, VERIFY]
    with harness.pair(
        theirs, prefill_tp=sizes[0], decode_tp=sizes[1], decode_geometry=ours, decode_env=modes, seed=sum(depths)
    ) as pair:
        handoffs = [each for number, _ in enumerate(modes) for each in around_pages(64, 10 * number, number)[number::2]]
        result = pair.handoff_many(handoffs, leftovers=leftovers)
        assert result.succeeded, [outcome.reasons for outcome in result.outcomes]
        assert not result.differences, [str(difference) for difference in result.differences]
        if not stock:
            check_ours(pair)
            counters = pair.hetero("hetero_counters")
            assert sum(each.get("verified", 0) for each in counters) > 0
            assert not any(each.get("differences") for each in counters)
        check_all_is_back(pair)


@pytest.mark.parametrize("depths", [(OFF_DEPTH, DEPTH_3), (DEPTH_5, DEPTH_1)], ids=lambda pair: f"P-{IDS[pair[0]]}")
@pytest.mark.parametrize(
    ("sizes", "page"),
    [((3, 2), 1), ((2, 3), 64), ((4, 1), 128)],
    ids=lambda value: f"P{value[0]}D{value[1]}" if isinstance(value, tuple) else f"page{value}",
)
def test_other_sizes_and_pages_with_requests_that_are_given_up(
    harness: Harness, sizes: tuple[int, int], page: int, depths: tuple[int, int]
) -> None:
    """Their pages and slots are others' next, with whatever was emptied or had arrived in them."""
    both = geometry(page, conv_layout=ConvLayout.WINDOW_FIRST, hidden_size=48, **(SIXES if 3 in sizes else {}))
    theirs, ours = (replace(both, draft_tokens=depth) for depth in depths)
    with harness.pair(
        theirs, prefill_tp=sizes[0], decode_tp=sizes[1], decode_geometry=ours, decode_env=SCARCE, seed=page
    ) as pair:
        for turn in range(3):
            lost = [Handoff(150, 3, seed=100 * turn + number, abort=Abort(on, number)) for number, on in enumerate(On)]
            kept = around_pages(page, 100 * turn + 10)
            result = pair.handoff_many(
                [each for pairs in zip(kept, lost, strict=False) for each in pairs] + kept[len(lost) :],
                leftovers=Leftovers.UNTOUCHED,
                before_compare=lambda pair, _: pair.quiet(),
            )
            assert not result.differences, [str(difference) for difference in result.differences]
            assert sum(outcome.succeeded for outcome in result.outcomes) >= len(kept), result.outcomes
        check_ours(pair)
        check_all_is_back(pair)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=lambda pair: f"P{pair[0]}D{pair[1]}")
@pytest.mark.parametrize(
    ("depths", "layout", "words"),
    [
        ((OFF_DEPTH, DEPTH_3), ConvLayout.CHANNELS_FIRST, "is speculative decoding the same on both sides"),
        ((DEPTH_3, OFF_DEPTH), ConvLayout.CHANNELS_FIRST, "is speculative decoding the same on both sides"),
        ((DEPTH_1, DEPTH_5), ConvLayout.WINDOW_FIRST, "number of draft tokens"),
        ((DEPTH_5, DEPTH_1), ConvLayout.WINDOW_FIRST, "number of draft tokens"),
    ],
    ids=["decode-drafts", "prefill-drafts", "more-at-decode", "more-at-prefill"],
)
def test_sglang_s_own_path_is_refused(
    harness: Harness, depths: tuple[int, int], layout: ConvLayout, words: str, sizes: tuple[int, int]
) -> None:
    """It writes rows of metadata and slots at prefill's sizes, or ends its transfer thread with an exception."""
    theirs, ours = sides(layout, *depths)
    with harness.pair(
        theirs, prefill_tp=sizes[0], decode_tp=sizes[1], decode_geometry=ours, prefill_env=OFF, decode_env=OFF
    ) as pair:
        result = pair.handoff_many([Handoff(70, seed=1), Handoff(10, seed=2)])
        for outcome in result.outcomes:
            assert not outcome.prefill and not outcome.decode, outcome
            assert any(words in reason and "remove SGLANG_HETERO=off" in reason for reason in outcome.reasons), outcome
        assert not result.differences, [str(difference) for difference in result.differences]


@pytest.mark.parametrize("layout", ConvLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize("depths", DEPTHS, ids=lambda pair: f"P-{IDS[pair[0]]}-D-{IDS[pair[1]]}")
def test_layer_by_layer(harness: Harness, depths: tuple[int, int], layout: ConvLayout) -> None:
    """Forward passes of prefill, the draft's included where it has one, and pieces that leave while they run."""
    theirs, ours = sides(layout, *depths)
    with harness.pair(
        theirs, prefill_tp=2, decode_tp=1, decode_geometry=ours, forward=Forward(layer_seconds=0.005)
    ) as pair:
        result = check(pair, around_pages(64))
        assert result.early_bytes > 0
        check_all_is_back(pair)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=lambda pair: f"P{pair[0]}D{pair[1]}")
def test_without_this_package_on_either_side_rows_of_other_requests_are_overwritten(
    harness: Harness, sizes: tuple[int, int]
) -> None:
    """What the refusals above are for: success is said, with equal TP sizes, too. It fails on the day that upstream is
    right."""
    theirs, ours = sides(ConvLayout.CHANNELS_FIRST, OFF_DEPTH, DEPTH_3)
    with harness.pair(
        theirs, prefill_tp=sizes[0], decode_tp=sizes[1], decode_geometry=ours, prefill_env=STOCK, decode_env=STOCK
    ) as pair:
        result = pair.handoff_many([Handoff(70, seed=1), Handoff(10, seed=2)])
        assert result.succeeded, result.outcomes
        assert any(each.name == "output_hidden_states" and each.foreign_items for each in result.differences)
