"""Whether a server gets requests: what it answers, and what becomes of requests that it was given. Pure.

           probe answered                       probe or request failed
    PROBING --------------> HEALTHY  -------------------------------------> SUSPECT
       ^                       ^  <---------------------------------------     |
       | probe answered        |     probe answered and its time is over,      | `failures` probes or lost
       |                       |     or a request succeeded                    | connections in a row
       +------- EVICTED        +--------------------------------- PROBING      v
                   ^              `successes` probes in a row        |      EVICTED
                   +-------------------------------------------------+ probe failed

A failed request is not always the server's fault: its peer may be to blame. So failed requests alone make a server
suspect, which gets requests only where no healthy one fits; a connection that breaks, or a probe without an answer, is
the server's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What a server is taken for."""

    PROBING = "probing"
    """New, or evicted and answering again."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    EVICTED = "evicted"


@dataclass(frozen=True)
class Limits:
    """failures, successes: in a row. Times in seconds. interval: between probes of a healthy server, and at most of an
    evicted one, which is asked again after `backoff`, and after twice as long with each failure. A suspect one waits as
    long for its return, `max_backoff` at most."""

    failures: int = 3
    successes: int = 2
    interval: float = 10.0
    backoff: float = 1.0
    max_backoff: float = 30.0


class Health:
    """One server's. Times are those of `clock`, in seconds from any start. Not thread-safe."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self.state = State.PROBING
        self.cause = "it has not been asked yet"
        """Why it is not healthy."""
        self.next_probe = clock()
        """When it is to be asked again."""
        self._fresh = True
        """Whether it has never failed: a server that has just come is given the benefit of the doubt."""
        self._lost = 0
        """Probes without an answer, and connections that broke, in a row."""
        self._failed = 0
        """Requests that failed since the last one that succeeded."""
        self._answered = 0
        """Probes answered in a row since the eviction."""
        self._evictions = 0
        """Failed probes since the eviction, which the back-off grows with."""
        self._suspect_until = clock()

    @property
    def tier(self) -> int | None:
        """0: first choice. 1: only where there is no first choice. None: gets no requests."""
        if self.state is State.HEALTHY:
            return 0
        if self.state is State.SUSPECT or (self.state is State.PROBING and self._fresh):
            return 1
        return None

    def probe_answered(self) -> None:
        """/health said 200."""
        now = self._clock()
        self._lost = 0
        if self.state is State.EVICTED:
            self.state, self._answered = State.PROBING, 0
        if self.state is State.PROBING:
            self._answered += 1
            if self._fresh or self._answered >= self._limits.successes:
                self._heal()
        elif self.state is State.SUSPECT and now >= self._suspect_until:
            # What failed requests have brought about is not forgotten: the next one that fails makes it wait longer.
            self.state, self.cause = State.HEALTHY, ""
        self.next_probe = now + (self._limits.interval if self.state is State.HEALTHY else self._limits.backoff)

    def probe_failed(self, cause: str) -> None:
        """/health said something else, or nothing within its time."""
        self._unreachable(cause)

    def request_succeeded(self) -> None:
        """A request was served to its end, or, on prefill, handed over."""
        self._lost = self._failed = 0
        if self.state is State.SUSPECT or (self.state is State.PROBING and self._fresh):
            self._heal()
            self.next_probe = self._clock() + self._limits.interval

    def request_failed(self, cause: str, *, lost: bool) -> None:
        """A request failed here. lost: the connection could not be made or broke; else the server said so itself."""
        if self.state is State.EVICTED:
            return
        if lost:
            self._unreachable(cause)
            return
        self._failed += 1
        self._suspect(cause)

    def request_excused(self) -> None:
        """A request that failed here, because the server said so, was itself the cause."""
        self._failed = max(0, self._failed - 1)
        if self.state is State.SUSPECT and not self._failed and not self._lost:
            self._heal()

    def _suspect(self, cause: str) -> None:
        now = self._clock()
        if self.state in (State.HEALTHY, State.SUSPECT) or self._fresh:
            self.state = State.SUSPECT
        self._fresh, self.cause = False, cause
        self._suspect_until = now + self._backoff(self._failed)
        self.next_probe = min(self.next_probe, now)

    def _unreachable(self, cause: str) -> None:
        now = self._clock()
        self._lost += 1
        if self.state in (State.EVICTED, State.PROBING) or self._lost >= self._limits.failures:
            self.state, self.cause, self._fresh = State.EVICTED, cause, False
            self._evictions += 1
            # Never less often than a healthy one: it may be back at any time, and a probe costs nothing.
            self.next_probe = now + min(self._backoff(self._evictions), self._limits.interval)
            return
        self.state, self.cause, self._fresh = State.SUSPECT, cause, False
        self.next_probe = now + self._limits.backoff

    def _heal(self) -> None:
        self.state, self.cause, self._fresh = State.HEALTHY, "", False
        self._evictions = self._answered = 0

    def _backoff(self, times: int) -> float:
        """Seconds after so many failures in a row."""
        doublings = min(max(times - 1, 0), 30)
        return min(self._limits.backoff * (1 << doublings), self._limits.max_backoff)
