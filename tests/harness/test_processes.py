"""The processes: single-threaded forks, bounded errors when a rank ends, and nothing left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from . import Geometry, Harness, HarnessTimeout, RankDied, processes
from .errors import CommandFailed
from .processes import COMMAND_SECONDS, ZygoteProcess

GONE_SECONDS = 10.0


def test_the_zygote_has_one_thread(harness: Harness) -> None:
    assert harness.zygote_threads == 1


def test_a_dead_rank_is_a_clear_error_and_the_next_pair_works(harness: Harness) -> None:
    with harness.pair(Geometry(), prefill_tp=1, decode_tp=1) as pair:
        pair.decode[0].kill()
        started = time.monotonic()
        with pytest.raises(
            RankDied, match=r"decode 0 of 1 died during poison, exit code -9(?s:.*)last lines of decode"
        ):
            pair.handoff(tokens=10)
        assert time.monotonic() - started < COMMAND_SECONDS
    with harness.pair(Geometry(), prefill_tp=1, decode_tp=1) as pair:
        result = pair.handoff(tokens=10)
    assert result.succeeded and not result.differences


def test_a_crash_inside_a_command_is_a_clear_error(harness: Harness) -> None:
    with (
        harness.pair(Geometry(), prefill_tp=1, decode_tp=1) as pair,
        pytest.raises(RankDied, match=r"prefill 0 of 1 died during crash, exit code -6"),
    ):
        pair.prefill[0].call("crash")


def test_a_failed_command_brings_its_traceback_and_the_rank_goes_on(harness: Harness) -> None:
    with harness.pair(Geometry(), prefill_tp=1, decode_tp=1) as pair:
        with pytest.raises(CommandFailed, match="prefill refused"):
            pair.handoff(tokens=13 * 64)
        assert pair.decode[0].exit_code() is None


def test_a_silent_rank_is_a_timeout(harness: Harness) -> None:
    with harness.pair(Geometry(), prefill_tp=1, decode_tp=1) as pair:
        os.kill(pair.decode[0].pid, signal.SIGSTOP)
        with pytest.raises(HarnessTimeout, match="decode 0 of 1: no answer to poll"):
            pair.decode[0].call("poll", [], seconds=0.2)
        os.kill(pair.decode[0].pid, signal.SIGCONT)
        # The late answer, [], is not taken for the next command's.
        assert pair.decode[0].call("poison") is None


def test_a_late_answer_of_the_zygote_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    zygote = ZygoteProcess(preload=False)
    try:
        os.kill(zygote.ready["pid"], signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(processes, "FORK_SECONDS", 0.2)
            with pytest.raises(HarnessTimeout, match="the zygote did not answer"):
                zygote.command("status", pid=1)
            with pytest.raises(HarnessTimeout, match="the zygote did not answer"):
                zygote.spawn("nobody's", {})
        os.kill(zygote.ready["pid"], signal.SIGCONT)
        rank = zygote.spawn("rank", {})
        assert rank.exit_code() is None
        rank.kill()
        assert rank.exit_code() == -signal.SIGKILL
    finally:
        zygote.stop()


def test_a_zygote_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes, "ZYGOTE_SECONDS", 0.0)
    # `failed` keeps the object alive, so that nobody tidies up in its place.
    with pytest.raises(HarnessTimeout) as failed:
        ZygoteProcess()
    assert "the zygote did not answer" in str(failed.value)
    (process,) = started
    assert process.returncode is not None
    assert not list(tmp_path.iterdir())


def test_nothing_outlives_the_test_process(tmp_path: Path) -> None:
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]
    script = (
        f"from {package}.processes import ZygoteProcess\n"
        "zygote = ZygoteProcess(preload=False)\n"
        "rank = zygote.spawn('rank', {})\n"
        "print(zygote.ready['pid'], rank.pid, flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Killed, the owner cannot remove its logs; pytest does.
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    assert all(_alive(pid) for pid in pids)
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + GONE_SECONDS
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
