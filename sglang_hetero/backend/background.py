"""Jobs that may wait for a peer, away from the threads that must not: few threads, a bounded queue, one job per key."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""A thread without a job ends after this time."""


class Background:
    """Runs jobs in the order of asking. Everything may be called from any thread, and none of it waits.

    Threads are daemons: a job that hangs does not keep the process from ending. What a job raises is logged.
    """

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        """threads: jobs that run at the same time. waiting: how many may stand behind them."""
        self._name, self._threads, self._limit = name, threads, waiting
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._running: set[Hashable] = set()
        self._alive = self._idle = 0
        self._closed = False

    def submit(self, key: Hashable, job: Callable[[], object]) -> bool:
        """Run the job soon. False, and it will not be run: a job with this key waits or runs, or there are too many."""
        with self._changed:
            if self._closed or key in self._waiting or key in self._running or len(self._waiting) >= self._limit:
                return False
            self._waiting[key] = job
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._alive < self._threads:
                self._alive += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            return True

    def has(self, key: Hashable) -> bool:
        """Whether a job with this key waits or runs."""
        with self._changed:
            return key in self._waiting or key in self._running

    @property
    def jobs(self) -> int:
        """How many wait or run."""
        with self._changed:
            return len(self._waiting) + len(self._running)

    def close(self) -> None:
        """Begin nothing more; what runs goes on."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, job = found
            try:
                job()
            except BaseException:  # the thread goes on, whatever a job was
                logger.exception("%s: a job for %s", self._name, key)
            finally:
                with self._changed:
                    self._running.discard(key)

    def _next(self) -> tuple[Hashable, Callable[[], object]] | None:
        """The next job; None: the thread ends."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_SECONDS)
            self._idle -= 1
            if not self._waiting:
                self._alive -= 1
                return None
            key, job = self._waiting.popitem(last=False)
            self._running.add(key)
            return key, job
