"""Jobs that may wait for a peer, away from the threads that must not: few threads, a bounded queue, one job per key."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

THREADS, WAITING = 4, 256
"""For questions to peers: how many are asked at the same time, and how many may wait for that."""
IDLE_SECONDS = 1.0
"""A thread without a job ends after this time."""
OVERDUE_SECONDS = 30.0
"""A job that runs for longer gives its place to the next one, and goes on. Questions of ours take a few seconds; but
looking up a name, and a question of SGLang's to a peer that answers byte by byte, have no end that we could set."""
MAX_THREADS = 32
"""Jobs that run at the same time at most, those without a place included; beyond that nothing new begins."""


class Background:
    """Runs jobs in the order of asking. Everything may be called from any thread, and none of it waits.

    Threads are daemons: a job that hangs does not keep the process from ending. What a job raises is logged.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int = THREADS,
        waiting: int = WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """threads: jobs that run at the same time. waiting: how many may stand behind them."""
        self._name, self._places, self._limit, self._clock = name, threads, waiting, clock
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._running: dict[Hashable, float] = {}  # since when
        self._alive = 0
        """Threads: those that run a job, and those that look for one."""
        self._closed = False

    def submit(self, key: Hashable, job: Callable[[], object]) -> bool:
        """Run the job soon. False, and it will not be run: a job with this key waits or runs, there are too many, or
        the system gives no thread."""
        with self._changed:
            if self._closed or key in self._waiting or key in self._running or len(self._waiting) >= self._limit:
                return False
            self._waiting[key] = job
            self._changed.notify()
            self._man()
            if not self._alive:
                del self._waiting[key]
                return False
            return True

    def close(self) -> None:
        """Begin nothing more; what runs goes on."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _man(self) -> None:
        """Have a thread look for each job that may begin now, and for one that may not yet. The lock is held."""
        wanted = min(len(self._waiting), max(1, self._places - len(self._in_place(self._clock()))))
        while self._alive < MAX_THREADS and self._alive - len(self._running) < wanted:
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the limit of processes: whoever asks must not fail with it
                logger.warning("%s: no further thread: %s", self._name, error)
                return
            self._alive += 1

    def _in_place(self, now: float) -> list[float]:
        """Since when the jobs run that are not overdue. The lock is held."""
        return [since for since in self._running.values() if now - since < OVERDUE_SECONDS]

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, job = found
            try:
                job()
            except BaseException:  # the thread goes on, whatever a job was
                logger.exception("%s: a job for %s", self._name, key)
            finally:
                with self._changed:
                    del self._running[key]
                    self._changed.notify()

    def _next(self) -> tuple[Hashable, Callable[[], object]] | None:
        """The next job; None: the thread ends."""
        with self._changed:
            ends = self._clock() + IDLE_SECONDS
            while not self._closed:
                now = self._clock()
                if self._waiting:
                    running = self._in_place(now)
                    if len(running) < self._places:
                        key, job = self._waiting.popitem(last=False)
                        self._running[key] = now
                        self._man()
                        return key, job
                    ready = min(running) + OVERDUE_SECONDS
                else:
                    ready = ends
                    if now >= ends:
                        break
                self._changed.wait(ready - now)
            self._alive -= 1
            return None
