"""TP sizes of which neither divides the other."""

import pytest
from real_pair import Pair, Shape, fault

SHAPE = Shape(kv_heads=12, key_heads=12, value_heads=12)


@fault(r"^P3 -> D2: Success, Success; nobody asks prefill ranks \[2\]; decode rank 0, K: \d+ bytes wrong")
def test_more_prefill_ranks_are_refused():
    """Unpatched both decode ranks say Success with wrong bytes, if prefill's scheduler gets that far: its last rank is
    asked by nobody, and the others wait for it until SGLang's bootstrap timeout."""
    refused(3, 2)


@fault(r"^P2 -> D3: WaitingForInput, WaitingForInput, Failed: Could not fetch bootstrap info.*target_tp_rank: 2")
def test_more_decode_ranks_are_refused():
    """Unpatched the last decode rank asks for a prefill rank that does not exist."""
    refused(2, 3)


@fault(r"^P6 -> D4: Success, .*nobody asks prefill ranks \[4, 5\]")
def test_sizes_with_a_common_divisor_are_refused():
    refused(6, 4)


def refused(prefill_tp: int, decode_tp: int) -> None:
    pair = Pair(SHAPE, prefill_tp, decode_tp)
    outcome = pair.hand_over()
    found = (
        f"P{prefill_tp} -> D{decode_tp}: {', '.join(outcome.ends)}; nobody asks prefill ranks {outcome.unasked}; "
        f"{'; '.join(pair.wrong())}"
    )
    for end in outcome.ends:
        assert f"prefill={prefill_tp}, decode={decode_tp}" in end and "--tp-size" in end, found
    assert not pair.written(), found


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (3, 1), (1, 3), (6, 2), (3, 6)]
)
def test_sizes_that_divide_are_served(prefill_tp, decode_tp):
    pair = Pair(SHAPE, prefill_tp, decode_tp)
    outcome = pair.hand_over()
    assert outcome.succeeded, outcome
    assert not pair.wrong(), pair.wrong()
