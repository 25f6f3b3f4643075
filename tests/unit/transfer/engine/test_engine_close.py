"""An engine that is closed while writes are under way or wait: nothing begins, nobody hangs, everybody is told."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hetero.transfer.engine.base import EngineError
from sglang_hetero.transfer.engine.memfabric import MemFabric
from sglang_hetero.transfer.engine.mooncake import Limits, Mooncake

SECONDS = 10
PEER = "127.0.0.1:1"
FOUR = np.arange(1, 5, dtype=np.uint64)
UNDER_WAY, LANDED, LOST = 0, 1, -1


class Native:
    """Transfers end when the test says so; calls for a whole batch return then."""

    def __init__(self):
        self.state, self.begun, self.unregistered = {}, threading.Semaphore(0), []
        self.calls, self.returns = 0, threading.Event()
        self.registering = lambda: None

    def batch_register_memory(self, *_):
        self.registering()
        return 0

    def batch_unregister_memory(self, addresses):
        self.unregistered += addresses
        return 0

    def unregister_memory(self, address):
        return self.batch_unregister_memory([address])

    def transfer_submit_write(self, *_):
        number = len(self.state) + 1
        self.state[number] = UNDER_WAY
        self.begun.release()
        return number

    def transfer_check_status(self, number):
        return self.state[number]

    def batch_transfer_sync_write(self, *_):
        self.calls += 1
        self.begun.release()
        assert self.returns.wait(SECONDS)
        return 0


@pytest.fixture
def native():
    made = Native()
    yield made
    made.returns.set()
    made.state = dict.fromkeys(made.state, LANDED)


def asking(native):
    upstream = SimpleNamespace(engine=native, session_id="own:1")
    return Mooncake(upstream, Limits(descriptors=2, outstanding=2, asks=True), patience=100 * SECONDS)


def batches(native, kind=Mooncake):
    return kind(SimpleNamespace(engine=native, session_id="own:1"), Limits(descriptors=2, outstanding=2))


class Write:
    """A write of two parts on a thread of its own."""

    def __init__(self, engine):
        self.error, self.ended = None, threading.Event()
        threading.Thread(target=self._run, args=(engine,), daemon=True).start()

    def _run(self, engine):
        try:
            engine.write(PEER, FOUR, FOUR, FOUR)
        except EngineError as error:
            self.error = error
        self.ended.set()

    def result(self):
        assert self.ended.wait(SECONDS)
        return self.error


@pytest.mark.parametrize(("how", "settled"), [(LANDED, True), (LOST, False)], ids=["lands", "is lost"])
def test_a_write_under_way_is_given_up_and_its_end_is_told_later(native, how, settled):
    engine = asking(native)
    write = Write(engine)
    assert all(native.begun.acquire(timeout=SECONDS) for _ in range(2))
    engine.close()
    error = write.result()
    assert "was closed during a write" in str(error) and not error.settled
    told, done = [], threading.Event()
    error.unfinished.when_ended(lambda settled: (told.append(settled), done.set()))
    assert not told and len(native.state) == 2, "the second part was never begun"
    native.state.update(dict.fromkeys((1, 2), how))
    assert done.wait(SECONDS)
    assert told == [settled]
    books = engine._peers[PEER]
    assert (books.users, books._free) == (0, 2)


def test_a_part_that_has_landed_when_it_is_closed_is_the_last(native):
    engine = asking(native)

    def check(number):
        engine.close()
        return LANDED

    native.transfer_check_status = check
    error = Write(engine).result()
    assert "closed" in str(error) and error.settled
    assert len(native.state) == 2


@pytest.mark.parametrize("make", [asking, batches])
def test_who_waits_for_room_is_refused(native, make):
    engine = make(native)
    first = Write(engine)
    assert native.begun.acquire(timeout=SECONDS)
    peer = engine._peers[PEER]
    waiting = threading.Semaphore(0)
    wait_for = peer._freed.wait_for
    peer._freed.wait_for = lambda *arguments: (waiting.release(), wait_for(*arguments))[1]
    others = [Write(engine) for _ in range(3)]
    assert waiting.acquire(timeout=SECONDS)
    engine.close()
    for other in others:
        error = other.result()
        assert "closed" in str(error) and error.settled
    native.returns.set()
    assert first.result() is not None


@pytest.mark.parametrize("kind", [Mooncake, MemFabric])
def test_a_call_for_a_batch_ends_by_itself_and_is_the_last(native, kind):
    engine = batches(native, kind)
    write = Write(engine)
    assert native.begun.acquire(timeout=SECONDS)
    engine.close()
    assert not write.ended.is_set()
    native.returns.set()
    error = write.result()
    assert "closed" in str(error) and error.settled, "what was begun has landed"
    assert native.calls == 1


@pytest.mark.parametrize("kind", [Mooncake, MemFabric])
def test_what_is_registered_meanwhile_is_let_go(native, kind):
    engine = batches(native, kind)
    native.registering = engine.close
    with pytest.raises(EngineError, match="closed"):
        engine.register([(4096, 10), (8192, 10)])
    assert native.unregistered == [4096, 8192]
