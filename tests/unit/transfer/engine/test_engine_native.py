"""What the native engines share: books of peers are bounded, and those in use stay."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hetero.transfer.engine import mooncake, native
from sglang_hetero.transfer.engine.base import EngineError
from sglang_hetero.transfer.engine.mooncake import Limits, Mooncake

ONE = np.array([4096], np.uint64)
TWO = np.array([4096, 8192], np.uint64)
PATIENCE = 0.02
UNDER_WAY, LANDED, LOST = 0, 1, -1


class Asked:
    """In the place of Mooncake's native engine: what each transfer's beginning gives, and how it is."""

    def __init__(self, *begun: int | Exception) -> None:
        self.begun = list(begun)
        self.state = {number: UNDER_WAY for number in begun if isinstance(number, int)}

    def transfer_submit_write(self, *_: object) -> int:
        number = self.begun.pop(0)
        if isinstance(number, Exception):
            raise number
        return number

    def transfer_check_status(self, number: int) -> int:
        return self.state[number]


def failure(native_engine: Asked, data: np.ndarray = TWO) -> tuple[Mooncake, EngineError]:
    upstream = SimpleNamespace(engine=native_engine, session_id="own:1")
    engine = Mooncake(upstream, Limits(descriptors=4, outstanding=4, asks=True), patience=PATIENCE)
    with pytest.raises(EngineError) as error:
        engine.write("127.0.0.1:1", data, data, data)
    return engine, error.value


def told(error: EngineError) -> list[bool]:
    """What is said of an unfinished write, when it has been."""
    assert error.unfinished is not None
    said, done = [], threading.Event()
    error.unfinished.when_ended(lambda settled: (said.append(settled), done.set()))
    assert done.wait(10)
    return said


class Probed(Asked):
    """The same, and how a peer answers probes."""

    def __init__(self, *answers: int) -> None:
        super().__init__(*range(1, 9))
        self.state = dict.fromkeys(self.state, LANDED)
        self.answers = list(answers)

    def send_probe(self, _: str) -> int:
        return self.answers.pop(0)


def probed(*answers: int) -> tuple[Mooncake, Probed]:
    native_engine = Probed(*answers)
    upstream = SimpleNamespace(engine=native_engine, session_id="own:1")
    return Mooncake(upstream, Limits(descriptors=4, outstanding=4, asks=True)), native_engine


def test_a_peer_is_probed_until_something_has_been_moved():
    engine, native_engine = probed(-1, 0, 0)
    with pytest.raises(EngineError, match=r"cannot reach 127.0.0.1:1 \(code -1\)") as raised:
        engine.write("127.0.0.1:1", TWO, TWO, TWO)
    assert raised.value.settled and native_engine.begun == list(range(1, 9)), "nothing was begun"
    assert "Mooncake of own:1 cannot reach" in str(raised.value) and "its log says why" in str(raised.value)
    native_engine.begun.insert(0, mooncake.REFUSALS[0])
    with pytest.raises(EngineError, match="failed"):
        engine.write("127.0.0.1:1", TWO, TWO, TWO)
    for _ in range(2):
        engine.write("127.0.0.1:1", TWO, TWO, TWO)
    assert native_engine.answers == []


def test_nothing_to_move_probes_nobody():
    engine, _ = probed()
    engine.write("127.0.0.1:1", [], [], [])


def test_peers_of_former_times_are_forgotten_and_those_in_use_are_not(monkeypatch):
    monkeypatch.setattr(native, "MAX_PEERS", 3)
    go_on, begun = threading.Event(), threading.Event()

    def write(session, *_):
        if session == "busy:1":
            begun.set()
            go_on.wait(10)
        return 0

    upstream = SimpleNamespace(engine=SimpleNamespace(batch_transfer_sync_write=write), session_id="own:1")
    engine = Mooncake(upstream, Limits(descriptors=1, outstanding=1))
    thread = threading.Thread(target=engine.write, args=("busy:1", ONE, ONE, ONE))
    thread.start()
    assert begun.wait(10)
    busy = engine._peers["busy:1"]
    for number in range(10):
        engine.write(f"peer:{number}", ONE, ONE, ONE)
        engine.write("often:1", ONE, ONE, ONE)
    assert list(engine._peers) == ["busy:1", "peer:9", "often:1"]
    assert engine._peers["busy:1"] is busy, "its limit counts what is under way"
    go_on.set()
    thread.join()
    engine.write("peer:10", ONE, ONE, ONE)
    assert "busy:1" not in engine._peers


def test_a_write_that_may_have_been_begun_is_never_settled_by_the_others():
    asked = Asked(7, RuntimeError("a native error"))
    _, error = failure(asked)
    assert not error.settled and error.unfinished is not None
    asked.state[7] = LANDED
    assert told(error) == [False]


@pytest.mark.parametrize("refused", [0, (1 << 64) - 1], ids=["zero", "minus one"])
def test_a_write_that_was_refused_is_settled_when_the_others_have_landed(refused):
    asked = Asked(7, refused)
    _, error = failure(asked)
    asked.state[7] = LANDED
    assert told(error) == [True]


def test_a_port_that_refuses_does_not_settle_what_is_under_way(monkeypatch):
    monkeypatch.setattr(mooncake, "refuses_connections", lambda session: True)
    asked = Asked(7, 8)
    _, error = failure(asked)
    assert not error.settled and error.unfinished is not None
    asked.state.update({7: LANDED, 8: LOST})
    assert told(error) == [False]


def test_a_port_that_refuses_does_not_settle_what_has_failed(monkeypatch):
    """Its connection is broken; what the two kernels hold of it may be applied later by a process that lives."""
    monkeypatch.setattr(mooncake, "refuses_connections", lambda session: True)
    asked = Asked(7, 8)
    asked.state.update({7: LANDED, 8: LOST})
    _, error = failure(asked)
    assert "nobody listens there any more" in str(error)
    assert not error.settled and error.unfinished is None, "nobody will know more"


def test_what_has_landed_settles_a_write_of_which_the_rest_was_never_begun(monkeypatch):
    monkeypatch.setattr(mooncake, "refuses_connections", lambda session: True)
    asked = Asked(7, 0)
    asked.state[7] = LANDED
    _, error = failure(asked)
    assert error.settled


def test_what_is_left_is_looked_after_although_there_was_no_thread_for_it_once(monkeypatch):
    class NoThread:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    asked = Asked(7, 8, 9, 10)
    with monkeypatch.context() as without:
        without.setattr("sglang_hetero.transfer.engine.asked.threading.Thread", NoThread)
        engine, first = failure(asked)
    with pytest.raises(EngineError) as error:
        engine.write("127.0.0.1:1", ONE, ONE, ONE)
    asked.state.update(dict.fromkeys((7, 8, 9), LANDED))
    assert told(first) == [True] and told(error.value) == [True]


def test_the_books_of_a_peer_stay_while_a_write_to_it_is_unfinished(monkeypatch):
    monkeypatch.setattr(native, "MAX_PEERS", 1)
    asked = Asked(7, 8, 9)
    engine, error = failure(asked)
    asked.state[9] = LANDED
    books = engine._peers["127.0.0.1:1"]
    engine.write("127.0.0.1:2", ONE, ONE, ONE)
    assert engine._peers["127.0.0.1:1"] is books
    asked.state.update({7: LANDED, 8: LANDED})
    assert told(error) == [True]
    assert books.users == 0 and books._free == 4


def test_an_old_release_is_refused(monkeypatch):
    monkeypatch.setattr(mooncake, "version", lambda name: "0.3.11.post1")
    upstream = SimpleNamespace(engine=Asked(), session_id="own:1")
    with pytest.raises(EngineError, match=r"0\.3\.11\.post1.*install 0\.3\.12"):
        Mooncake(upstream, Limits(descriptors=1, outstanding=1, asks=True))
    Mooncake(upstream, Limits(descriptors=1, outstanding=1))
