"""A thread per rank that looks about once a second what this process holds, and whether that is as it must be.

What it finds wrong goes to the log when it begins and when it ends, and with everything else to the server's folder
(state/folder.py), where the HTTP process reads it. It only reads, and what it cannot read it leaves out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sglang_hetero.state import folder, process
from sglang_hetero.state.report import Report
from sglang_hetero.transfer.worker import Worker

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks: a health check of a router or of Kubernetes comes every few seconds."""


class Watch:
    """The thread of one rank."""

    def __init__(
        self,
        look: Callable[[], Report],
        where: Path,
        *,
        tell: Callable[[Report], None] = lambda report: None,
        seconds: float = LOOK_SECONDS,
    ) -> None:
        """look: made anew each time, from this thread. where: the server's folder. tell: a metrics page, say."""
        self._look, self._where, self._tell, self._seconds = look, where, tell, seconds
        self._ending = threading.Event()
        self._seen: frozenset[str] = frozenset()
        self._said: frozenset[str] = frozenset()
        self._unwritten = self._failed = False
        self._last: Report | None = None
        self._parents = process.parents(os.getpid())  # as they were at the start: one that ends is one no more
        self.worker = Worker("hetero-watch", self._run)

    def stop(self) -> None:
        """End the thread, at once if it waits."""
        self.worker.stop()
        self._ending.set()

    def look(self) -> Report:
        """One report. A fault is one that was there the last time, too: what a moment brings is none."""
        report = self._look()
        found = frozenset(report.faults)
        lasting, self._seen = found & self._seen, found
        report.faults = [fault for fault in report.faults if fault in lasting]
        self._say(report.rank, lasting)
        return report

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._once()
                self._failed = False
            except Exception:
                if not self._failed:
                    logger.exception("this rank's state cannot be told; said once until it can")
                self._failed = True
            self._ending.wait(self._seconds)

    def _once(self) -> None:
        try:
            report = self._last = self.look()
        except Exception as error:
            # A rank that cannot be looked at still runs: what was seen last, and why nothing newer is.
            if self._last is not None:
                self._last.problems = [f"its state cannot be told any more: {type(error).__name__}: {error}"]
                self._write(self._last)
            raise
        self._write(report)
        self._tell(report)

    def _write(self, report: Report) -> None:
        report.parents, report.at, report.beat = self._parents, time.time(), time.monotonic()
        try:
            folder.write(self._where, report)
        except OSError as error:
            if not self._unwritten:
                logger.error("%s: the report for /hetero/state cannot be written: %s", report.rank, error)
            self._unwritten = True
        else:
            self._unwritten = False

    def _say(self, rank: str, faults: frozenset[str]) -> None:
        for fault in sorted(faults - self._said):
            logger.error("%s: fault: %s", rank, fault)
        for fault in sorted(self._said - faults):
            logger.warning("%s: no fault any more: %s", rank, fault)
        self._said = faults
