"""Counts of what a rank has moved, refused and dropped since it was started."""

import threading
from collections import Counter
from collections.abc import Callable


def _nobody(name: str, by: int) -> None:
    pass


class Counters:
    """Named integers that only grow; any thread may add."""

    def __init__(self, observe: Callable[[str, int], None] = _nobody) -> None:
        """observe: told of every count, for a metrics page."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._observe = observe

    def add(self, name: str, by: int = 1) -> None:
        """Count `by` more."""
        with self._lock:
            self._counts[name] += by
        self._observe(name, by)

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)
