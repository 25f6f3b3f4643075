"""The thread that looks after writes that nobody waits for: whatever is raised, everybody is told, once."""

import threading

import pytest

from sglang_hetero.transfer.engine import asked
from sglang_hetero.transfer.engine.asked import Inquiry, Watch

SECONDS = 10
UNDER_WAY, LANDED = 0, 1


class Left:
    """A call of one transfer that is left to `watch`."""

    def __init__(self, watch, ended=lambda: None):
        self.said, self.told, self.heard = UNDER_WAY, [], threading.Event()
        inquiry = Inquiry(self.ask)
        inquiry.add(7)
        self.unfinished = watch.take(inquiry, ended)
        self.unfinished.when_ended(self.tell)

    def ask(self, number):
        if isinstance(self.said, BaseException):
            raise self.said
        return self.said

    def tell(self, settled):
        self.told.append(settled)
        self.heard.set()

    def lands(self):
        self.said = LANDED
        assert self.heard.wait(SECONDS)
        return self.told


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(asked, "WATCH_SECONDS", 0.005)
    return Watch("test")


def thread_of(watch):
    (thread,) = [each for each in threading.enumerate() if each.name == f"hetero-{watch._name}-watch"]
    return thread


def test_it_ends_when_nothing_is_left_and_begins_again(watch):
    for _ in range(2):
        one, other = Left(watch), Left(watch)
        thread = thread_of(watch)
        assert one.lands() == [True]
        assert thread.is_alive() and not other.told
        assert other.lands() == [True]
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("native"), SystemExit(1)], ids=lambda error: type(error).__name__)
def test_what_cannot_be_asked_about_is_unknown_and_the_others_are_looked_after(watch, caplog, error):
    lost, other = Left(watch), Left(watch)
    lost.said = error
    assert lost.heard.wait(SECONDS)
    assert lost.told == [False]
    assert "cannot be asked about" in caplog.text
    assert other.lands() == [True]
    assert Left(watch).lands() == [True]


@pytest.mark.parametrize("error", [ValueError("ours"), SystemExit(1)], ids=lambda error: type(error).__name__)
def test_whoever_raises_when_it_is_told_hinders_nobody(watch, caplog, error):
    def fail(*_):
        raise error

    books, taker, other = Left(watch, ended=fail), Left(watch), Left(watch)
    assert books.lands() == [True], "its taker is told although the books could not be kept"
    taker.tell = fail
    taker.unfinished.when_ended(taker.tell)
    taker.said = LANDED
    assert other.lands() == [True]
    assert Left(watch).lands() == [True]
    assert "could not be told" in caplog.text


def test_what_goes_wrong_in_the_thread_itself_does_not_end_it(watch, monkeypatch, caplog):
    failed = threading.Event()

    def fail(inquiry):
        failed.set()
        raise MemoryError

    left = Left(watch)
    with monkeypatch.context() as patch:
        patch.setattr(asked, "_has_ended", fail)
        assert failed.wait(SECONDS)
    assert left.lands() == [True]
    assert "there will be another" in caplog.text
