"""Runs stages one after the other, each in a process of its own with a time limit, ended with all its children."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from sglang_hetero.doctor.lines import Line, fail, one_line
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher.process import Supervised

from .stage import Ended, Settings, Stage, judge, left_out, obstacle

POLL_SECONDS = 0.2
PROGRESS_SECONDS = 10.0
PROGRESS_WORDS = 100
"""Characters of a log's last line that a progress line shows."""
NOWHERE = "http://127.0.0.1"
"""A stage answers no requests; `Supervised` wants a URL."""
LAST_LINES = 12

Tell = Callable[[str], None]


def run_all(stages: Iterable[Stage], settings: Settings, tell: Tell) -> Iterator[tuple[Stage, list[Line], float]]:
    """Each stage with its lines and the seconds that it took. A stage that fails does not keep others from it."""
    for stage in stages:
        started = time.monotonic()
        if why := obstacle(stage, settings):
            tell(f"{stage.name}: skipped, {why}")
            yield stage, left_out(stage, why), 0.0
            continue
        tell(f"{stage.name}: started, at most {stage.seconds:.0f} s")
        try:
            lines = run(stage, settings, tell)
        except (HeteroError, OSError) as error:
            lines = [
                fail(stage.name, "start", str(error), "see that this host can start processes, and write its files")
            ]
            lines += left_out(stage, "the stage could not be started")
        yield stage, lines, time.monotonic() - started


def run(stage: Stage, settings: Settings, tell: Tell) -> list[Line]:
    """One stage. Raises HeteroError or OSError if its process cannot be started."""
    folder = Path(settings.folder)
    output, log = folder / f"{stage.name}.jsonl", folder / f"{stage.name}.log"
    output.write_bytes(b"")
    encoded = msgspec.json.encode(settings).decode()
    command = [sys.executable, "-m", "sglang_hetero.validate.child", stage.run, encoded, stage.argument, str(output)]
    process = Supervised(stage.name, command, os.environ, log, NOWHERE)
    stopped = 0.0
    try:
        started = shown = time.monotonic()
        while process.poll() is None:
            now = time.monotonic()
            if now - started > stage.seconds:
                stopped = now - started
                break
            if now - shown > PROGRESS_SECONDS:
                shown = now
                tell(f"{stage.name}: {now - started:.0f} s, {one_line(process.tail(1))[:PROGRESS_WORDS]}")
            time.sleep(POLL_SECONDS)
    finally:
        process.stop()
    code = process.exit_code if process.exit_code is not None else -1
    failed = bool(stopped or code)
    return judge(stage, output.read_bytes(), Ended(code, stopped, process.tail(LAST_LINES) if failed else ""))
