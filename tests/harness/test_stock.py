"""Peers that do not have this package at all: served where SGLang's own path is right, else refused on both sides."""

from dataclasses import replace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Geometry, Handoff, Harness, Leftovers, On
from .product import STOCK, around_pages, geometry

SHAPE = geometry(64)
WINDOW_FIRST = replace(SHAPE, conv_layout=ConvLayout.WINDOW_FIRST)
SOON = 10.0
"""Seconds until decode, which learns it first, must have failed a refused request."""

stock_on_either_side = pytest.mark.parametrize("stock", list(On), ids=lambda on: f"stock-{on.value}")


@stock_on_either_side
@pytest.mark.parametrize(
    ("shape", "prefill_tp", "decode_tp"),
    [
        pytest.param(SHAPE, 2, 2, id="P2D2"),
        pytest.param(WINDOW_FIRST, 2, 2, id="P2D2-window-first"),
        pytest.param(SHAPE, 2, 1, id="P2D1"),
        pytest.param(SHAPE, 1, 2, id="P1D2"),
    ],
)
def test_served_where_upstream_is_right(
    harness: Harness, stock: On, shape: Geometry, prefill_tp: int, decode_tp: int
) -> None:
    environment = {f"{stock.value}_env": STOCK}
    with harness.pair(shape, prefill_tp=prefill_tp, decode_tp=decode_tp, **environment) as pair:
        result = pair.handoff_many(around_pages(64), Leftovers.COPIED)
        assert result.succeeded, result.outcomes
        assert not result.differences, [str(difference) for difference in result.differences]


@stock_on_either_side
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)], ids=lambda tp: f"{tp}")
def test_refused_where_upstream_would_corrupt(harness: Harness, stock: On, prefill_tp: int, decode_tp: int) -> None:
    """The conv layout of an NPU. With this package on neither side it is served, silently wrong."""
    environment = {f"{stock.value}_env": STOCK}
    with harness.pair(WINDOW_FIRST, prefill_tp=prefill_tp, decode_tp=decode_tp, **environment) as pair:
        result = pair.handoff_many([Handoff(70, seed=1)])
        (outcome,) = result.outcomes
        assert not outcome.prefill and not outcome.decode, outcome
        assert any("window" in reason and "install sglang-hetero" in reason for reason in outcome.reasons), (
            outcome.reasons
        )
        assert not result.differences, [str(difference) for difference in result.differences]
        assert result.seconds < SOON


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)], ids=lambda tp: f"{tp}")
def test_without_this_package_on_either_side_window_first_slots_are_wrong(
    harness: Harness, prefill_tp: int, decode_tp: int
) -> None:
    """What the refusals above are for. It fails on the day that upstream is right."""
    with harness.pair(
        WINDOW_FIRST, prefill_tp=prefill_tp, decode_tp=decode_tp, prefill_env=STOCK, decode_env=STOCK
    ) as pair:
        result = pair.handoff(64)
        assert result.succeeded, result.outcomes
        assert result.differences
