"""A thread of ours: nothing that ends it is silent."""

import threading

import pytest

from sglang_hetero.transfer.worker import Worker

SECONDS = 20.0


def ended(worker: Worker) -> None:
    worker.thread.join(SECONDS)
    assert not worker.thread.is_alive()


def test_one_that_runs_and_one_that_was_stopped_have_no_fault():
    gate = threading.Event()
    worker = Worker("hetero-test", gate.wait)
    assert worker.thread.name == "hetero-test" and worker.fault == ""
    worker.stop()
    assert worker.stopped
    gate.set()
    ended(worker)
    assert worker.fault == ""


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("stopped", [False, True])
def test_what_escapes_is_kept_and_logged(error, stopped, caplog):
    gate = threading.Event()

    def run() -> None:
        gate.wait(SECONDS)
        raise error

    worker = Worker("hetero-test", run)
    if stopped:
        worker.stop()
    gate.set()
    ended(worker)
    assert worker.failure is error
    assert worker.fault == f"the thread hetero-test has ended: {type(error).__name__}: {error}"
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


def test_one_that_just_returns_is_a_fault():
    worker = Worker("hetero-test", lambda: None)
    ended(worker)
    assert worker.fault == "the thread hetero-test has ended, nobody knows why"
