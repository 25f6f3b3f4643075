"""What was noted of forward passes is told in order, when it is due, and as little of it as says everything."""

import threading
import time

import pytest
import torch

from sglang_hetero.device import HostCopy
from sglang_hetero.transfer.follower import Begun, Follower, Located, Note
from sglang_hetero.transfer.outbox import Chunk, Move, Placed
from sglang_hetero.transfer.pieces import COMPLETE, NOTHING, layer_done

SECONDS = 5.0


class Recorder:
    """Remembers what it is told; `gate` holds the first call back."""

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def reached(self, room, chunk, mark) -> None:
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.told.append((room, mark))

    def locate(self, room, move, placed) -> None:
        self.told.append((room, move, placed))

    def computed(self, room, *, last) -> None:
        self.told.append((room, "computed", last))


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def follower(recorder):
    made = Follower("test", recorder, tells_end=False)
    yield made
    made.stop()
    made.worker.thread.join(SECONDS)
    assert not made.worker.thread.is_alive()


def begun(*rooms: int, placed: Placed | None = None, last: bool = False) -> list[Begun]:
    return [Begun(room, Chunk(0, 1, 4, last, handed_over=False, reached=NOTHING, placed=placed)) for room in rooms]


def until(true) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_every_request_of_a_pass_is_told(recorder, follower):
    follower.put(Note(begun(1, 2), layer_done(3), lambda: True))
    until(lambda: len(recorder.told) == 2)
    assert recorder.told == [(1, layer_done(3)), (2, layer_done(3))]


def test_in_order_and_not_before_it_is_due(recorder, follower):
    due = {0: False, 1: True}
    one, two = begun(1), begun(2)
    follower.put(Note(one, layer_done(0), lambda: due[0]))
    follower.put(Note(two, COMPLETE, lambda: due[1]))
    time.sleep(0.02)
    assert recorder.told == []
    due[0] = True
    until(lambda: len(recorder.told) == 2)
    assert recorder.told == [(1, layer_done(0)), (2, COMPLETE)]


def test_only_the_last_note_of_a_pass_that_is_due(recorder, follower):
    """While the first is told five more come, of which the last is not due yet."""
    recorder.gate.clear()
    first, due = begun(1), {"last": False}
    follower.put(Note(begun(9), COMPLETE, lambda: True))
    for layer in range(4):
        follower.put(Note(first, layer_done(layer), lambda: True))
    follower.put(Note(first, layer_done(4), lambda: due["last"]))
    recorder.gate.set()
    until(lambda: len(recorder.told) >= 2)
    time.sleep(0.02)
    assert recorder.told == [(9, COMPLETE), (1, layer_done(3))]
    due["last"] = True
    until(lambda: len(recorder.told) == 3)
    assert recorder.told[-1] == (1, layer_done(4))


def test_the_place_must_be_known(recorder, follower):
    class Slow(HostCopy):
        known = False

        def ready(self) -> bool:
            return self.known

    copy = Slow(torch.tensor([1]))
    follower.put(Note(begun(1, placed=Placed(HostCopy(torch.tensor([1])), copy)), COMPLETE, lambda: True))
    time.sleep(0.02)
    assert recorder.told == []
    copy.known = True
    until(lambda: recorder.told == [(1, COMPLETE)])


def test_an_error_ends_neither_the_thread_nor_what_follows(recorder, follower, caplog):
    recorder.error = RuntimeError("no")
    follower.put(Note(begun(1), COMPLETE, lambda: True))
    follower.put(Note(begun(2), COMPLETE, lambda: 1 // 0))
    follower.put(Note(begun(3), COMPLETE, lambda: True))
    until(lambda: recorder.told == [(3, COMPLETE)])
    assert caplog.text.count("could not be followed") == 1  # the other one at DEBUG


def test_the_end_of_a_pass_is_told_where_nobody_else_does():
    recorder = Recorder()
    follower = Follower("test", recorder, tells_end=True)
    follower.put(Note(begun(1, last=True), layer_done(0), lambda: True))
    until(lambda: recorder.told == [(1, layer_done(0))])
    follower.put(Note(begun(2, last=True), COMPLETE, lambda: True))
    until(lambda: len(recorder.told) == 3)
    assert recorder.told[1:] == [(2, "computed", True), (2, COMPLETE)]
    follower.stop()
    follower.worker.thread.join(SECONDS)


def test_stop_while_a_device_never_comes_to_an_end(recorder):
    follower = Follower("test", recorder, tells_end=False)
    follower.put(Note(begun(1), COMPLETE, lambda: False))
    time.sleep(0.01)
    follower.stop()
    follower.worker.thread.join(SECONDS)
    assert not follower.worker.thread.is_alive() and recorder.told == []


def test_a_move_is_told_when_its_place_can_be_read_and_in_its_turn(recorder, follower):
    class Slow(HostCopy):
        known = False

        def ready(self) -> bool:
            return self.known

    copy = Slow(torch.tensor([1]))
    placed, move = Placed(copy), Move(1, 1)
    follower.put(Located(5, move, placed))
    follower.put(Note(begun(1), COMPLETE, lambda: True))
    time.sleep(0.02)
    assert recorder.told == []
    copy.known = True
    until(lambda: recorder.told == [(5, move, placed), (1, COMPLETE)])


def test_an_error_of_one_request_is_not_anothers(recorder, follower):
    recorder.error = RuntimeError("no")
    follower.put(Note(begun(1, 2), COMPLETE, lambda: True))
    until(lambda: recorder.told == [(2, COMPLETE)])


def test_no_note_is_lost_between_a_look_and_the_sleep_after_it(recorder, follower):
    """Nobody wakes the thread but the note itself."""
    for room in range(300):
        first, done = begun(room), len(recorder.told)
        follower.put(Note(first, layer_done(0), lambda: True))
        until(lambda done=done: len(recorder.told) > done)
        follower.put(Note(first, COMPLETE, lambda: True))
    until(lambda: len(recorder.told) == 600)
