"""Whether a request has stood still for too long, as far as this process was there to see it."""

AWAY_SECONDS = 1.0
"""A pause between two looks that is longer is taken for one of the whole process (SIGSTOP, a suspended machine), in
which what peers said stayed unread. SGLang's scheduler looks several times a second, but while a forward pass runs."""
CATCH_UP_SECONDS = 1.0
"""After such a pause: for the threads that receive to read what has come. They need milliseconds."""


class Stillness:
    """Of one request, for the thread that polls it."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._back: float | None = None
        """When a look first found it too still, behind a pause."""

    def too_long(self, now: float, idle: float, limit: float) -> bool:
        """Whether nothing has happened for more than `limit` seconds although this process was awake.

        now: of a clock that goes on while the process is stopped. idle: since something new has happened. Seconds.
        """
        away, self._looked = now - self._looked > AWAY_SECONDS, now
        if idle <= limit:
            self._back = None
            return False
        if self._back is None:
            if not away:
                return True
            self._back = now
        return now - self._back >= CATCH_UP_SECONDS
