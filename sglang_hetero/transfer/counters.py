"""Counts of what a rank has moved, refused and dropped since it was started."""

import threading
from collections import Counter


class Counters:
    """Named integers that only grow; any thread may add."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, by: int = 1) -> None:
        """Count `by` more."""
        with self._lock:
            self._counts[name] += by

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)
