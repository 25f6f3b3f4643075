"""Source side: one thread per decode rank that writes what may be written, whatever requests it belongs to.

A destination that has nothing to write at the moment is on no list, so the thread never waits for an acknowledgement
or a device: it takes the next one. Requests of one peer take turns, batch by batch.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Protocol

from .outbox import Destination

logger = logging.getLogger(__name__)

STOP = None


class Turn(Protocol):
    """What the mover does with a destination: write one batch of it; True if there is more to write now."""

    def __call__(self, destination: Destination) -> bool: ...


class Mover:
    """The thread of one peer."""

    def __init__(self, name: str, turn: Turn) -> None:
        self._turn = turn
        self._runnable: queue.SimpleQueue[Destination | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"hetero-mover {name}", daemon=True)
        self.thread.start()

    def wake(self, destination: Destination) -> None:
        """Put a destination on the list. The caller sees to it that it is there once at most."""
        self._runnable.put(destination)

    def stop(self) -> None:
        """End the thread after its present batch."""
        self._runnable.put(STOP)

    def _run(self) -> None:
        while (destination := self._runnable.get()) is not STOP:
            try:
                if self._turn(destination):
                    self._runnable.put(destination)
            except BaseException:
                # `turn` fails the request itself; whatever gets here is a fault of ours, and the thread serves others.
                logger.exception("room %d to %s: the mover's turn failed", destination.room, destination.peer.label)
