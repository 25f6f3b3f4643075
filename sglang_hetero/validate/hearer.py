"""Lines that another process says on its standard output, with a time limit for each."""

from __future__ import annotations

import queue
import subprocess
import threading
import time

_END = ""
"""Behind the last line; a line has at least its end."""


class Hearer:
    """Hears a process that was started with `stdout=PIPE, text=True, errors="replace"` (native code prints anything).

    A thread reads to the end: `select` before `readline` would wait for ever for a line that the stream has already
    taken into its buffer behind another one, and a process that nobody reads any more would stop at a full pipe.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = False
        threading.Thread(target=self._read, args=(process,), name=f"hearer-{process.pid}", daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                self._lines.put(line)
        except (OSError, ValueError):  # closed by whoever ended the process
            pass
        finally:
            self._lines.put(_END)

    def line(self, deadline: float) -> str | None:
        """The next line, "" behind the last one; None if none has come by `deadline`, a time of `time.monotonic`."""
        if self._ended:
            return _END
        try:
            found = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        self._ended = found == _END
        return found
