"""Metadata rows (first token, log-probabilities, hidden state) whose length differs between prefill and decode.

That of the hidden state does: 64 bytes without speculation, else a hidden state of the draft model (scheduler.py,
init_disaggregation).
"""

import pytest
from real_pair import Pair, Shape, fault

PLAIN, DRAFT = 64, 256
TCP = "SGLANG_MOONCAKE_SEND_AUX_TCP"
"""SGLang's switch: rows travel in a message, and decode writes them."""


def pair_with(prefill: int, decode: int) -> Pair:
    return Pair(Shape(hidden_bytes={"prefill": prefill, "decode": decode}), 1, 1)


def arrives(pair: Pair) -> None:
    outcome = pair.hand_over()
    assert outcome.succeeded, outcome
    wrong = pair.wrong()
    assert not wrong, "\n".join(wrong)


@fault(r"^decode rank 0, metadata output_hidden_states: \d+ bytes wrong, in items \[0, 3\]$")
def test_a_shorter_row_is_the_requests_own():
    """Unpatched it is written into the row of another request, 0, and not into its own, 3."""
    arrives(pair_with(PLAIN, DRAFT))


@fault(r"^decode rank 0, metadata output_hidden_states: \d+ bytes wrong, in items \[3, 12, 13, 14, 15\]$")
def test_a_longer_row_spoils_no_other():
    """Unpatched it is written over four other rows; with a row nearer the end, over memory behind the buffer."""
    arrives(pair_with(DRAFT, PLAIN))


@fault(r"^decode rank 0, metadata output_hidden_states: \d+ bytes wrong, in items \[4, 5, 6\]$")
def test_a_longer_row_in_a_message_spoils_no_other(monkeypatch):
    monkeypatch.setenv(TCP, "1")
    arrives(pair_with(DRAFT, PLAIN))


@fault(r"^it is not said$")
def test_it_is_said(caplog):
    arrive = pair_with(PLAIN, DRAFT)
    arrive.hand_over()
    assert "Rows of metadata buffers differ in bytes" in caplog.text, "it is not said"


@pytest.mark.parametrize("tcp", ["0", "1"])
def test_equal_rows_stay_right(monkeypatch, tcp, caplog):
    monkeypatch.setenv(TCP, tcp)
    arrives(pair_with(DRAFT, DRAFT))
    assert "Rows of metadata buffers" not in caplog.text


def test_a_shorter_row_in_a_message_stays_right(monkeypatch):
    monkeypatch.setenv(TCP, "1")
    arrives(pair_with(PLAIN, DRAFT))


@pytest.mark.parametrize("others", [[], [b"somebody else's"]], ids=["an older one", "another extension of the message"])
def test_a_decode_that_sends_no_lengths_is_served_as_before(monkeypatch, others):
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    stock_frames = 20
    build = MooncakeKVManager.build_receiver_registration_message
    monkeypatch.setattr(
        MooncakeKVManager,
        "build_receiver_registration_message",
        lambda self: build(self)[:stock_frames] + others,
    )
    arrives(pair_with(DRAFT, DRAFT))
