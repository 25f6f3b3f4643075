"""Jobs that wait for peers: bounded, one per key, and nothing of them stops the threads."""

import logging
import threading

import pytest

from sglang_hetero.backend import background
from sglang_hetero.backend.background import Background
from tests.unit.backend.prefill_server import SOON, until


def done_with(jobs):
    return not jobs._waiting and not jobs._running


def test_one_job_per_key_and_a_bounded_queue():
    jobs, go_on, done = Background("test-jobs", threads=2, waiting=3), threading.Event(), []

    def job(key):
        go_on.wait(10)
        done.append(key)

    for key in "ab":
        assert jobs.submit(key, lambda key=key: job(key))
    until(lambda: len(jobs._running) == 2)
    assert not jobs.submit("a", lambda: job("a again")), "it runs"
    assert [jobs.submit(key, lambda key=key: job(key)) for key in "cdef"] == [True, True, True, False]
    assert not jobs.submit("c", lambda: job("c again")), "it waits"
    go_on.set()
    until(lambda: done_with(jobs))
    assert sorted(done) == list("abcde")
    assert jobs.submit("a", lambda: job("a"))
    jobs.close()
    assert not jobs.submit("b", lambda: job("b"))


def test_a_job_that_raises_ends_no_thread(caplog):
    jobs, done = Background("test-jobs", threads=1, waiting=100), []

    def fail():
        raise SystemExit("no reason")

    with caplog.at_level(logging.ERROR):
        for key in range(20):
            jobs.submit(key, fail if key % 2 else lambda key=key: done.append(key))
        until(lambda: done_with(jobs))
    assert done == list(range(0, 20, 2))
    assert "no reason" in caplog.text
    jobs.close()


def test_threads_without_jobs_end(monkeypatch):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.05)
    before = set(threading.enumerate())
    jobs = Background("test-jobs", threads=3, waiting=10)
    for key in range(3):
        jobs.submit(key, lambda: None)
    until(lambda: done_with(jobs))
    until(lambda: not set(threading.enumerate()) - before)
    done = threading.Event()
    assert jobs.submit("again", done.set)
    assert done.wait(10)
    jobs.close()


class Hung:
    """Jobs that run until they are let go. Time stands still unless it is moved."""

    def __init__(self, threads):
        self.now, self.begun, self.go_on = 100.0, [], threading.Event()
        self.jobs = Background("test-jobs", threads=threads, waiting=100, clock=lambda: self.now)

    def submit(self, key):
        def job():
            self.begun.append(key)
            self.go_on.wait(SOON)

        return self.jobs.submit(key, job)

    def end(self):
        self.go_on.set()
        until(lambda: done_with(self.jobs))
        self.jobs.close()


def test_jobs_that_hang_keep_others_from_beginning_for_a_while_only(monkeypatch):
    monkeypatch.setattr(background, "OVERDUE_SECONDS", 0.1)
    jobs, go_on, done = Background("test-jobs", threads=2, waiting=10), threading.Event(), threading.Event()
    for key in range(4):
        jobs.submit(key, lambda: go_on.wait(SOON))
    assert jobs.submit("later", done.set)
    assert done.wait(SOON), "nobody asked again meanwhile"
    go_on.set()
    until(lambda: done_with(jobs))
    jobs.close()


def test_a_job_keeps_its_place_until_it_is_overdue():
    hung = Hung(threads=2)
    for key in range(4):
        assert hung.submit(key)
    until(lambda: len(hung.begun) == 2)
    hung.now += background.OVERDUE_SECONDS - 1
    assert hung.submit("wake")
    assert hung.begun == [0, 1]
    assert hung.jobs._alive == 3, "one thread looks out for a place"
    hung.now += 1
    assert hung.submit("again")
    until(lambda: len(hung.begun) == 4)
    hung.end()


def test_jobs_that_hang_are_bounded(monkeypatch):
    monkeypatch.setattr(background, "MAX_THREADS", 5)
    hung = Hung(threads=1)
    for key in range(9):
        hung.now += background.OVERDUE_SECONDS
        assert hung.submit(key)
        until(lambda key=key: len(hung.begun) == min(key + 1, 5))
    assert hung.jobs._alive == 5
    hung.end()
    assert hung.begun == list(range(9))


@pytest.mark.parametrize("alive", [0, 1])
def test_a_system_that_gives_no_thread(alive, monkeypatch):
    """Whoever asks is SGLang's scheduler, and would end with the server."""
    hung = Hung(threads=2)
    if alive:
        hung.submit("first")
        until(lambda: hung.begun)

    def start(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert hung.submit("a") is bool(alive)
    assert hung.jobs._alive == alive
    assert hung.submit("a") is not bool(alive), "it waits, if there is a thread that will come to it"
    hung.end()
    assert hung.begun.count("a") == 1
