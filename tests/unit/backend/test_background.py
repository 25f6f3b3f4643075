"""Jobs that wait for peers: bounded, one per key, and nothing of them stops the threads."""

import logging
import threading

from sglang_hetero.backend import background
from sglang_hetero.backend.background import Background
from tests.unit.backend.prefill_server import until


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
    assert (jobs.jobs, jobs.has("c"), jobs.has("f")) == (5, True, False)
    go_on.set()
    until(lambda: jobs.jobs == 0)
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
        until(lambda: jobs.jobs == 0)
    assert done == list(range(0, 20, 2))
    assert "no reason" in caplog.text
    jobs.close()


def test_threads_without_jobs_end(monkeypatch):
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.05)
    before = set(threading.enumerate())
    jobs = Background("test-jobs", threads=3, waiting=10)
    for key in range(3):
        jobs.submit(key, lambda: None)
    until(lambda: jobs.jobs == 0)
    until(lambda: not set(threading.enumerate()) - before)
    done = threading.Event()
    assert jobs.submit("again", done.set)
    assert done.wait(10)
    jobs.close()
