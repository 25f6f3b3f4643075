"""Counts of what a rank has moved, refused and dropped since it was started."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)


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
        """Count `by` more. Never raises: whoever counts is in the middle of something that matters more."""
        with self._lock:
            self._counts[name] += by
        try:
            self._observe(name, by)
        except Exception:
            logger.exception("the count of %s was not taken over", name)

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)
