"""When to say again what may have been lost: a broken connection loses what was under way, and says so to nobody."""

FIRST_SECONDS = 2.0
"""Silence after which what was said last is said again. Far above the way of a message and the merge of a batch, so
that nothing is repeated on a network that works; far below the time after which a request without progress fails."""
MOST_SECONDS = 16.0
"""The wait doubles up to this: a request may wait for minutes, say for its turn at prefill, and costs next to nothing
meanwhile, while a network that comes back is noticed within this time."""


class Repetition:
    """Of one request. Whoever hears a repetition treats it like the first time, so that saying too much is harmless."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._wait = FIRST_SECONDS

    def due(self, now: float, progress: float) -> bool:
        """Whether to say it again now. progress: when something new last happened. Both in seconds, of one clock."""
        if progress > self._last:
            self._last, self._wait = progress, FIRST_SECONDS
        if now - self._last < self._wait:
            return False
        self._last, self._wait = now, min(2 * self._wait, MOST_SECONDS)
        return True
