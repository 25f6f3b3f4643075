"""What peers do wrong, counted and said once."""

import logging
import threading
from collections import Counter


class Faults:
    """Counts what went wrong by kind and logs the first of each kind, so that a broken peer cannot fill the log."""

    def __init__(self, owner: str, log: logging.Logger) -> None:
        self._owner, self._log = owner, log
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, text: object, *, times: int = 1, traceback: bool = False) -> None:
        """kind: from a small set, never a peer's text. traceback: of the exception being handled."""
        with self._lock:
            first = not self._counts[kind]
            self._counts[kind] += times
        if first:
            self._log.warning("%s: %s: %s (further ones are only counted)", self._owner, kind, text, exc_info=traceback)

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
