"""Conv slots as an NPU has them, [window, channels], between unequal TP sizes."""

import pytest
from real_pair import Pair, Shape, fault

UNEQUAL = pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(2, 1), (4, 1), (4, 2), (1, 2), (2, 4)], ids=lambda tp: f"{tp}"
)
DRAFTS = pytest.mark.parametrize("draft_tokens", [0, 3], ids=lambda number: f"{number}-draft-tokens")


def arrives(pair: Pair) -> None:
    outcome = pair.hand_over()
    assert outcome.succeeded, outcome
    wrong = pair.wrong()
    assert not wrong, "\n".join(wrong)


@fault(r"^decode rank 0, conv of layer 0: \d+ bytes wrong, in items \[3, 4")
@UNEQUAL
@DRAFTS
def test_every_byte_is_in_its_place_and_the_next_slot_is_untouched(prefill_tp, decode_tp, draft_tokens):
    """Unpatched it succeeds, with wrong bytes in the request's slot, 3, and in another request's, 4."""
    arrives(Pair(Shape(npu=True, draft_tokens=draft_tokens), prefill_tp, decode_tp, "ascend"))


def test_equal_sizes_stay_right():
    arrives(Pair(Shape(npu=True, draft_tokens=3), 2, 2, "ascend"))


@UNEQUAL
def test_channels_first_slots_stay_right(prefill_tp, decode_tp):
    arrives(Pair(Shape(), prefill_tp, decode_tp))
