"""A stage that hangs, crashes, or says what is not so costs its own lines, and never passes."""

import os
import time
from pathlib import Path

import psutil
import pytest

from sglang_hetero.doctor.lines import Status
from sglang_hetero.validate import runner
from sglang_hetero.validate.stage import Settings, Stage

FAKES = "tests.unit.validate.fake_stages"
PROMISES = ("first", "second")
ENOUGH = 120.0
"""Seconds: a stage's process has to import this package on a busy machine."""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    )
    return Settings(device="cpu", count=1, folder=str(tmp_path))


def stage(name, seconds=ENOUGH, argument=""):
    return Stage("fake", f"{FAKES}:{name}", PROMISES, seconds, argument=argument)


def run(one, settings):
    told = []
    (found,) = runner.run_all([one], settings, told.append)
    assert found[0] is one
    return {line.name: line for line in found[1]}, told


def test_what_a_good_stage_says_is_what_there_is(settings):
    found, told = run(stage("fine", argument="first second"), settings)
    assert {name: line.status for name, line in found.items()} == dict.fromkeys(PROMISES, Status.OK)
    assert found["first"].figures == {"ms": 1.5}
    assert "started" in told[0]


class Clock:
    """Stands still until the stage hangs, then says that its time is over: however slow this machine is."""

    def __init__(self, hangs):
        self._hangs = hangs

    def monotonic(self):
        return 2 * ENOUGH if self._hangs() else 0.0

    def sleep(self, _seconds):
        time.sleep(0.05)


def test_a_stage_that_hangs_is_stopped_with_its_children(settings, tmp_path, monkeypatch):
    pid_file, log = tmp_path / "pid", tmp_path / "fake.log"
    monkeypatch.setattr(runner, "time", Clock(lambda: log.exists() and "Godot" in log.read_text()))
    found, _ = run(stage("hangs", argument=str(pid_file)), settings)
    whole = found["fake as a whole"]
    assert whole.status is Status.FAIL
    assert "stopped after" in whole.seen
    assert "waiting for Godot" in whole.seen
    assert found["first"].status is Status.OK
    assert found["second"].status is Status.SKIP
    assert not psutil.pid_exists(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("name", "words"),
    [("crashes", "ended by signal 6; its last words: it hurts here"), ("raises", "RuntimeError: no such luck")],
)
def test_a_stage_that_crashes_fails_with_its_last_words(name, words, settings):
    found, _ = run(stage(name), settings)
    assert found["fake as a whole"].status is Status.FAIL
    assert words in found["fake as a whole"].seen
    assert found["second"].status is Status.SKIP


def test_a_stage_that_says_nothing_fails_for_every_promise(settings):
    found, _ = run(stage("says_nothing"), settings)
    assert {name: line.status for name, line in found.items()} == dict.fromkeys(PROMISES, Status.FAIL)


def test_a_stage_that_never_comes_to_its_end_fails(settings):
    found, _ = run(stage("leaves_early"), settings)
    assert found["fake as a whole"].status is Status.FAIL
    assert "before its end" in found["fake as a whole"].seen


def test_stages_go_on_behind_one_that_cannot_start(settings, monkeypatch):
    def refuse(*_arguments):
        raise OSError(24, "Too many open files")

    real = runner.Supervised
    broken, good = stage("fine", argument="first second"), stage("fine", argument="first second")
    monkeypatch.setattr(runner, "Supervised", refuse)
    runs = runner.run_all([broken, good], settings, lambda _words: None)
    _, lines, _ = next(runs)
    assert [line.status for line in lines] == [Status.FAIL, Status.SKIP, Status.SKIP]
    assert "Too many open files" in lines[0].seen
    monkeypatch.setattr(runner, "Supervised", real)
    _, lines, _ = next(runs)
    assert [line.status for line in lines] == [Status.OK, Status.OK]
