"""Prefill and decode with different speculation: every byte of every decode pool, in both conv layouts.

What differs: rows of a window-first conv slot, the draft's caches, and the columns of the aux row that the draft begins
with. Draft tokens are the depth and one.
"""

from dataclasses import replace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Geometry, Harness, Leftovers
from .product import (
    PULL,
    PUSH,
    VERIFY,
    around_pages,
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
