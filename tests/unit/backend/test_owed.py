"""What decode owes to prefill servers of which it does not know where their ranks are."""

import pytest

from sglang_hetero.backend import owed as owed_module
from sglang_hetero.backend.owed import AGAIN_SECONDS, Owed

A, B, C = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"
WAITS = 300.0


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def owed(clock):
    return Owed(WAITS, clock=clock)


def test_each_request_is_told_once_to_its_server(owed):
    owed.add(A, 1, "one")
    owed.add(B, 1, "the same room elsewhere")
    owed.add(A, 2, "two")
    assert owed.take(A) == {1: "one", 2: "two"}
    assert owed.take(A) == {}
    assert owed.take(B) == {1: "the same room elsewhere"}


def test_a_room_that_is_used_again_is_left_alone(owed):
    owed.add(A, 1, "one")
    owed.drop(A, 1)
    owed.drop(A, 7)
    assert owed.of(A) == {}


def test_nobody_is_told_what_prefill_has_ended_by_itself(owed, clock):
    owed.add(A, 1, "one")
    clock.now += WAITS / 2
    owed.add(A, 2, "two")
    owed.add(B, 3, "three")
    clock.now += WAITS / 4
    owed.add(A, 1, "said again")
    clock.now += WAITS / 2
    assert owed.of(A) == {2: "two", 1: "said again"}
    clock.now += WAITS / 4
    assert owed.of(A) == {1: "said again"}
    assert owed.of(B) == {}
    clock.now += WAITS / 4
    assert owed.of(A) == {}
    assert owed.due() is None


def test_what_is_owed_is_bounded(owed, monkeypatch):
    monkeypatch.setattr(owed_module, "MAX_OWED", 3)
    for room in range(10):
        owed.add(A if room % 2 else B, room, "x")
    assert set(owed.of(A)) | set(owed.of(B)) == {7, 8, 9}


def test_servers_are_asked_in_turn(owed, clock):
    for room, address in enumerate((A, B, C, A)):
        owed.add(address, room, "x")
    assert {owed.due(), owed.due(), owed.due()} == {A, B, C}
    assert owed.due() is None
    clock.now += AGAIN_SECONDS
    first = owed.due()
    owed.take(first)
    others = {owed.due(), owed.due()}
    assert others == {A, B, C} - {first}
    assert owed.due() is None
    for address in (A, B, C):
        owed.take(address)
    clock.now += AGAIN_SECONDS
    assert owed.due() is None
    assert owed._asked == {}, "nothing is kept of a server to which nothing is owed"
