"""Servers with a feature that our path does not serve: they keep SGLang's own path, or are refused on both sides."""

import pytest

from . import Handoff, Harness, Leftovers
from .product import around_pages, geometry
from .scheduler import ROLE_SWITCH_ENV

SHAPE = geometry(64)
LIMITED = {ROLE_SWITCH_ENV: "1"}
SOON = 10.0
"""Seconds until both sides must have failed a refused request; SGLang's own limits are 40 s here."""
limited_on = pytest.mark.parametrize(
    "environment",
    [{"prefill_env": LIMITED}, {"decode_env": LIMITED}, {"prefill_env": LIMITED, "decode_env": LIMITED}],
    ids=["prefill", "decode", "both"],
)


@limited_on
def test_with_equal_tp_sizes_sglangs_own_path_serves_them(harness: Harness, environment) -> None:
    with harness.pair(SHAPE, prefill_tp=2, decode_tp=2, **environment) as pair:
        result = pair.handoff_many(around_pages(64), Leftovers.COPIED)
        assert result.succeeded, result.outcomes
        assert not result.differences, [str(difference) for difference in result.differences]
        assert not any(counters.get("bytes") for counters in pair.hetero("hetero_counters"))


@limited_on
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)], ids=["P2D1", "P1D2"])
def test_with_unequal_ones_they_are_refused_on_both_sides_at_once(
    harness: Harness, environment, prefill_tp: int, decode_tp: int
) -> None:
    with harness.pair(SHAPE, prefill_tp=prefill_tp, decode_tp=decode_tp, **environment) as pair:
        result = pair.handoff_many([Handoff(70, seed=1)])
        (outcome,) = result.outcomes
        assert not outcome.prefill and not outcome.decode, outcome
        assert any("--enable-pd-role-switch" in reason for reason in outcome.decode_reasons), outcome
        assert not result.differences, [str(difference) for difference in result.differences]
        assert result.seconds < SOON
