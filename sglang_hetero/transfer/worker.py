"""A thread that serves until it is told to stop, and can say that it does not any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Worker:
    """A daemon thread. One that ends before `stop` is a fault of ours: `fault` says so, and why.

    Started by the constructor. Everything may be called from any thread.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        """run: serves until it is stopped; whoever makes it return has called `stop` before."""
        self.name = name
        self.failure: BaseException | None = None
        """What ended the thread."""
        self._run, self._stopped = run, False
        self.thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """From now on the thread may end; this does not make it."""
        self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    @property
    def fault(self) -> str:
        """That the thread has ended although nobody has stopped it, and why; else an empty text."""
        failure = self.failure
        if failure is not None:
            return f"the thread {self.name} has ended: {type(failure).__name__}: {failure}"
        if self._stopped or self.thread.is_alive():
            return ""
        return f"the thread {self.name} has ended, nobody knows why"

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error
            logger.critical("the thread %s has ended: what it does is not done any more", self.name, exc_info=True)
