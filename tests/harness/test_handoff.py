"""Upstream's own transfer path, byte by byte, and what it is known not to do."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglang_hetero.layout.window import ConvLayout

from . import Geometry, Handoff, Harness, Pair

SMALL = Geometry()
STOCK = {name: {"SGLANG_HETERO": "off"} for name in ("prefill_env", "decode_env")}
MIXED = [Handoff(tokens=129, chunks=2, seed=1), Handoff(tokens=64, seed=2), Handoff(tokens=63, chunks=3, seed=3)]
"""Concurrent prompts with a partial, a full and a single partial last page, of 64-token pages."""


@pytest.fixture(scope="module")
def pages_of_128(harness: Harness) -> Iterator[Pair]:
    with harness.pair(replace(SMALL, page_size=128), prefill_tp=1, decode_tp=1, **STOCK) as pair:
        yield pair


@pytest.mark.parametrize("layout", ConvLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (4, 1), (1, 4)], ids=lambda tp: f"{tp}"
)
def test_every_byte_arrives(harness: Harness, layout: ConvLayout, prefill_tp: int, decode_tp: int) -> None:
    """Window-first slots with unequal TP sizes owe it to the repair of the axis (backend/conv_axis.py); what upstream
    does without it is in tests/unit/backend/test_installed_sglang.py."""
    geometry = replace(SMALL, conv_layout=layout)
    with harness.pair(geometry, prefill_tp=prefill_tp, decode_tp=decode_tp, **STOCK) as pair:
        result = pair.handoff_many(MIXED)
    assert result.succeeded, result.outcomes
    assert not result.differences, [str(difference) for difference in result.differences]


@pytest.mark.parametrize(
    ("geometry", "prefill_tp", "decode_tp"),
    [
        pytest.param(SMALL, 4, 1, id="P4D1"),
        pytest.param(replace(SMALL, kv_heads=2), 4, 1, id="P4D1-2-kv-heads-replicated-on-prefill"),
        pytest.param(replace(SMALL, kv_heads=2), 1, 4, id="P1D4-2-kv-heads-replicated-on-decode"),
        pytest.param(replace(SMALL, page_size=1, pages=400), 2, 1, id="P2D1-page-1"),
        pytest.param(replace(SMALL, page_size=128), 2, 1, id="P2D1-page-128"),
        pytest.param(replace(SMALL, draft_tokens=0), 2, 1, id="P2D1-without-MTP"),
        pytest.param(replace(SMALL, linear_value_dim=8, linear_key_dim=4), 2, 1, id="P2D1-value-wider-than-key"),
        pytest.param(
            replace(SMALL, kv_dtype="int8", conv_dtype="float32", ssm_dtype="bfloat16"), 1, 1, id="P1D1-three-dtypes"
        ),
    ],
)
def test_geometries(harness: Harness, geometry: Geometry, prefill_tp: int, decode_tp: int) -> None:
    with harness.pair(geometry, prefill_tp=prefill_tp, decode_tp=decode_tp, **STOCK) as pair:
        result = pair.handoff_many(MIXED)
    assert result.succeeded, result.outcomes
    assert not result.differences, [str(difference) for difference in result.differences]


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
def test_lengths_around_a_page(pages_of_128: Pair, tokens: int) -> None:
    result = pages_of_128.handoff(tokens, chunks=min(tokens, 3), seed=tokens)
    assert result.succeeded, result.outcomes
    assert not result.differences, [str(difference) for difference in result.differences]


def test_requests_get_scattered_pages_that_differ_between_the_sides(pages_of_128: Pair) -> None:
    result = pages_of_128.handoff(tokens=4 * 128)
    prefill, decode = result.prefill[0].pages, result.decode[0].pages
    assert prefill != decode
    for pages in (prefill, decode):
        assert any(after != before + 1 for before, after in itertools.pairwise(pages)), pages


def test_upstream_fails_a_long_prompt_and_from_then_on_every_prompt(harness: Harness) -> None:
    """Case 35: one descriptor per token and layer entry; Mooncake's TCP transport refuses so large a batch, and the
    session stays blacklisted (mooncake/conn.py:2740). Here 1,536 descriptors pass and 3,008 do not; 6,016 is safe."""
    with harness.pair(replace(SMALL, pages=100), prefill_tp=2, decode_tp=1, **STOCK) as pair:
        before, long, after = (pair.handoff(tokens) for tokens in (300, 6000, 300))
    assert before.succeeded and not before.differences
    assert not long.succeeded
    assert not after.succeeded, "upstream recovers now: delete this test"


def test_sides_of_different_geometry_are_refused_and_the_ranks_live(harness: Harness) -> None:
    """Upstream finds it, too, but raises in the loop of decode's scheduler (disaggregation/common/conn.py)."""
    other = replace(SMALL, page_size=128)
    with harness.pair(SMALL, prefill_tp=1, decode_tp=1, decode_geometry=other, **STOCK) as pair:
        result = pair.handoff_many([Handoff(tokens=10, seed=seed) for seed in range(2)])
    for outcome in result.outcomes:
        assert not outcome.prefill and not outcome.decode
        assert "pages of 128 tokens here, of 64 at prefill" in outcome.decode_reasons[0], outcome
        assert "--page-size" in outcome.decode_reasons[0]
    assert not result.differences, [str(difference) for difference in result.differences]
