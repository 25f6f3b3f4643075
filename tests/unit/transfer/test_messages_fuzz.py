"""A hundred thousand damaged messages: nothing but our own error, and what is taken keeps its ranges."""

import time

import msgspec
import pytest

from sglang_hetero.errors import MessageError
from sglang_hetero.transfer import messages as m
from tests.faults import fuzz
from tests.unit.transfer.test_messages import framed

SEED = 20_250_711
COUNT = 100_000


def test_a_hundred_thousand_damaged_messages():
    told = []
    summary = fuzz.run(COUNT, SEED, lambda done, of: told.append((done, of)))
    print(summary)
    assert not summary.wrong
    assert summary.count == sum(summary.outcomes.values()) == COUNT
    assert told[-1] == (COUNT, COUNT)
    assert len(told) > 50
    # So that the checks behind the types are reached, for every kind of message; far below what the seed gives.
    assert {kind for kind, _ in summary.outcomes} == set(fuzz.DAMAGES)
    assert summary.outcomes["plausible", "accepted"] > 2_000
    assert summary.kinds >= set(m.Message.__args__)
    assert all(summary.outcomes[kind, "refused"] > COUNT // 200 for kind in fuzz.DAMAGES)


def _raises(error):
    raise error


@pytest.mark.parametrize(
    ("parse", "shown"),
    [
        (lambda: _raises(IndexError("x")), "IndexError: x"),
        (lambda: _raises(SystemExit("y")), "SystemExit: y"),
        (lambda: _raises(MessageError("y" * 5000)), "an error of 5000 characters"),
        (lambda: _raises(MessageError("")), "an error of 0 characters"),
        (lambda: msgspec.structs.replace(m.Ping(incarnation="i"), room=-1), "Ping out of range"),
        (lambda: m.Ping(incarnation="a\nb"), "Ping out of range"),
    ],
)
def test_a_parser_that_is_wrong_is_found(monkeypatch, parse, shown):
    """The run says so with the bytes, and ends early."""
    monkeypatch.setitem(fuzz.DAMAGES, "bytes", (1, lambda rng: (b"\xab\xcd", parse)))
    summary = fuzz.run(5_000, SEED)
    assert len(summary.wrong) == fuzz.MAX_WRONG
    assert summary.count < 5_000
    assert all(line.startswith(f"bytes: {shown}") and line.endswith("abcd") for line in summary.wrong)


def test_the_same_seed_gives_the_same_messages():
    one, other = fuzz.run(2_000, 5), fuzz.run(2_000, 5)
    assert one.outcomes == other.outcomes
    assert fuzz.run(2_000, 6).outcomes != one.outcomes


@pytest.mark.parametrize("size", [1 << 20, (1 << 32) - 1])
def test_lists_that_announce_more_than_comes(size):
    start = framed(None)[:-1] + b"\x82" + b"".join(map(msgspec.msgpack.encode, ("type", "Ready", "pieces")))
    with pytest.raises(MessageError):
        m.decode(start + b"\xdd" + size.to_bytes(4, "big"))


def test_a_message_full_of_the_smallest_elements():
    """The most elements that fit: the number is looked at before they are."""
    many = [0] * (m.MAX_MESSAGE_BYTES - 100)
    data = framed({"type": "FirstGeneration", "chunks": many})
    began = time.perf_counter()
    with pytest.raises(MessageError, match="chunks"):
        m.decode(data)
    assert time.perf_counter() - began < fuzz.SLOWEST
