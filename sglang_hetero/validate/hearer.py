"""Lines that another process says on its standard output, with a time limit for each."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque

_END = ""
"""Behind the last line; a line has at least its end."""
KEPT_CHARACTERS = 1 << 20
"""Of what nobody has asked for yet, the latest: a process that has said READY goes on for hours. An answer has some
hundred, and whoever waits for one reads meanwhile."""


class Hearer:
    """Hears a process that was started with `stdout=PIPE, text=True, errors="replace"` (native code prints anything).

    A thread reads to the end: `select` before `readline` would wait for ever for a line that the stream has already
    taken into its buffer behind another one, and a process that nobody reads any more would stop at a full pipe. Of
    what is not asked for the oldest lines are dropped; a line that is too long to be kept comes in parts.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: deque[str] = deque()
        self._kept = 0
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(process,), name=f"hearer-{process.pid}", daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(KEPT_CHARACTERS):
                self._keep(line)
        except (OSError, ValueError):  # closed by whoever ended the process
            pass
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _keep(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._kept += len(line)
            while self._kept > KEPT_CHARACTERS:
                self._kept -= len(self._lines.popleft())
            self._changed.notify_all()

    def line(self, deadline: float) -> str | None:
        """The next line, "" behind the last one; None if none has come by `deadline`, a time of `time.monotonic`."""
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: bool(self._lines) or self._ended, left):
                return None
            if not self._lines:
                return _END
            found = self._lines.popleft()
            self._kept -= len(found)
            return found
