"""What a process did when, appended to a file of JSON lines: spans and instants, in a folder that all ranks share.

Whoever calls puts a tuple on a list and goes on; a thread writes what is there every FLUSH_SECONDS, and once more at
exit. The first line of a file says who the process is; it grows to MAX_FILE_BYTES, and no further. All times in it are
nanoseconds of the wall clock, got from the monotonic one by one pair of readings at start: so the spans of a process
never run backwards, and those of several processes of one machine lie on one axis as well as its clock is kept. Between
machines it is as good as theirs agree.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from sglang_hetero.errors import OptionError

logger = logging.getLogger(__name__)

VERSION = 1
SUFFIX = ".trace.jsonl"
FLUSH_SECONDS = 0.5
"""What a process that is killed loses at most."""
MAX_WAITING = 100_000
"""Spans that wait to be written, of some 300 bytes each; what comes on top is dropped and counted."""
MAX_FILE_BYTES = 128 << 20
"""Of a rank's file, some 450,000 spans, of which a request has about a hundred: a server that runs for weeks with a
trace does not fill the disk. Four such files are what `sglang-hetero trace` reads at a time (parts.MAX_EVENTS). What
comes on top is dropped and counted; only that count may lie beyond."""
NANOSECONDS = 1_000_000_000
OPTION = "SGLANG_HETERO_TRACE"


class Track(StrEnum):
    """Which of a rank's lanes a span is drawn in."""

    FORWARD = "forward"
    """Prefill's forward passes, and what its scheduler does."""
    LINK = "link"
    """Engine writes, by decode rank."""
    WAIT = "wait"
    """A request that waits at decode."""
    MERGE = "merge"
    """The merge worker's batches."""
    SCHEDULER = "scheduler"
    """Decode's scheduler: merges of linear state, first token, queue."""


Said = tuple[Track, str, float, float | None, int, dict[str, Any]]
"""Track, name, start and end (monotonic, in seconds; None for an instant), room, details."""


class NoTrace:
    """Traces nothing, at the price of a call."""

    on = False
    """Whether anything is written: ask before details are made that cost something."""

    def span(self, track: Track, name: str, start: float, end: float, room: int, **details: Any) -> None:
        """Something that took time. start, end: time.monotonic(). details: JSON values."""

    def instant(self, track: Track, name: str, at: float, room: int, **details: Any) -> None:
        """Something that happened at a moment."""

    def flush(self) -> None:
        """Write what has been said so far."""

    def close(self) -> None:
        """The same, and nothing more from now on."""


NO_TRACE = NoTrace()


def prepare(directory: Path) -> None:
    """Make the folder if it is not there. Raises OptionError if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".{os.getpid()}.probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise OptionError(f"{OPTION}={str(directory)!r}: no trace can be written there: {error.strerror}") from error


class Trace(NoTrace):
    """The trace of one rank."""

    on = True

    def __init__(
        self,
        directory: Path,
        side: str,
        rank: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """directory: made if it is not there. side, rank: of the process. Raises OptionError."""
        prepare(directory)
        name = re.sub(r"[^A-Za-z0-9]+", "-", rank).strip("-")
        self.path = directory / f"{name}-{os.getpid()}{SUFFIX}"
        self._anchor, self._wall = monotonic(), wall()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: list[Said] = []
        self._dropped = 0
        self._full = False
        """Whether the file has reached its limit."""
        self._stop = threading.Event()
        try:
            self._file = self.path.open("a", encoding="utf-8")
            head = {"version": VERSION, "side": side, "rank": rank, "pid": os.getpid(), "start": self._wall}
            self._file.write(json.dumps(head) + "\n")
            self._file.flush()
            # A process with the same number may have written to it before.
            self._bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise OptionError(f"{OPTION}: {self.path} cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="hetero-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def span(self, track: Track, name: str, start: float, end: float, room: int, **details: Any) -> None:
        self._put((track, name, start, end, room, details))

    def instant(self, track: Track, name: str, at: float, room: int, **details: Any) -> None:
        self._put((track, name, at, None, room, details))

    def _put(self, entry: Said) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            if not self._full and len(self._waiting) < MAX_WAITING:
                self._waiting.append(entry)
            else:
                self._dropped += 1

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self.flush()

    def flush(self) -> None:
        self._write(last=False)

    def _write(self, *, last: bool) -> None:
        """last: the file is closed next."""
        with self._writing:
            with self._lock:
                if self._full and not last:
                    self._dropped += len(self._waiting)
                    self._waiting.clear()
                    return
                waiting, self._waiting = self._waiting, []
                dropped, self._dropped = self._dropped, 0
            if self._file.closed or not (waiting or dropped):
                return
            try:
                lines = self._fitting(waiting)
                dropped += len(waiting) - len(lines)
                if dropped:
                    lines.append(json.dumps({"dropped": dropped}))
                self._file.write("".join(line + "\n" for line in lines))
                self._file.flush()
            except Exception:
                # A full disk, say: requests go on without a trace.
                logger.exception("%s is not written any more", self.path)
                self._stop.set()
                self._drop_file()

    def _fitting(self, waiting: list[Said]) -> list[str]:
        """The first of these as lines, as many as the file has room for."""
        lines: list[str] = []
        for entry in [] if self._full else waiting:
            line = self._line(entry)
            nbytes = len(line) + 1  # json.dumps gives ASCII
            if self._bytes + nbytes > MAX_FILE_BYTES:
                self._full = True
                logger.warning(
                    "%s has %d MiB, as much as a trace may: what comes from now on is dropped and counted",
                    self.path,
                    MAX_FILE_BYTES >> 20,
                )
                break
            self._bytes += nbytes
            lines.append(line)
        return lines

    def close(self) -> None:
        self._stop.set()
        self._write(last=True)
        with self._writing:
            self._drop_file()
        atexit.unregister(self.close)

    def _drop_file(self) -> None:
        try:
            self._file.close()
        except OSError:
            logger.warning("%s: its end is missing", self.path)

    def _line(self, said: Said) -> str:
        track, name, start, end, room, details = said
        entry: dict[str, Any] = {"track": track, "name": name, "at": self._nanoseconds(start), "room": room}
        if end is not None:
            # Of two readings of a clock the later is never less; a caller that subtracts may be off by a rounding.
            entry["took"] = max(0, self._nanoseconds(end) - entry["at"])
        if details:
            entry["details"] = details
        return json.dumps(entry)

    def _nanoseconds(self, monotonic: float) -> int:
        return self._wall + round((monotonic - self._anchor) * NANOSECONDS)


def trace_in(directory: str | None, side: str, rank: str) -> NoTrace:
    """The trace that the option asks for: in that folder, or none. Raises OptionError."""
    return NO_TRACE if directory is None else Trace(Path(directory), side, rank)
