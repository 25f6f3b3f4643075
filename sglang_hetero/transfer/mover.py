"""Source side: one thread per decode rank that writes what may be written, whatever requests it belongs to.

A destination that has nothing to write at the moment is on no list, so the thread never waits for an acknowledgement
or a device: it takes the next one. Requests of one peer take turns, batch by batch, short ones first.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import Protocol

import torch

from sglang_hetero.device import on_device

from .lines import Lines
from .outbox import Destination
from .worker import Worker

logger = logging.getLogger(__name__)

NICENESS = 10
"""Of a thread whose engine spins: the copying that it waits for goes first. Measured on two cores over TCP with 18,592
tokens: 2.2 times a bulk write and a memcpy without it, 1.6 to 1.9 times with it; 5 and 19 do the same."""


class Turn(Protocol):
    """What the mover does with a destination: write one batch of it; True if there is more to write now."""

    def __call__(self, destination: Destination) -> bool: ...


class Mover:
    """The thread of one peer."""

    def __init__(self, name: str, turn: Turn, device: torch.device, *, yields: bool = False) -> None:
        """device: the rank's. yields: give way to other threads of the host."""
        self._turn, self._device, self._yields = turn, device, yields
        self._runnable: Lines[Destination, None] = Lines(lambda destination, _: destination.untaken)
        self.worker = Worker(f"hetero-mover {name}", self._run)

    def wake(self, destination: Destination) -> None:
        """Put a destination on the list. The caller sees to it that it is there once at most."""
        self._runnable.put(destination, None)

    def has(self, destination: Destination) -> bool:
        """Whether a destination is on the list, or has its turn now."""
        return self._runnable.has(destination)

    def stop(self) -> None:
        """End the thread after its present batch."""
        self.worker.stop()
        self._runnable.stop()

    def _run(self) -> None:
        on_device(self._device)
        if self._yields:
            with suppress(OSError):  # Linux counts niceness by thread; where it is refused nothing is lost but time
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (found := self._runnable.take(1)) is not None and not self.worker.stopped:
            destination, _ = found
            try:
                if self._turn(destination):
                    self.wake(destination)
            except BaseException:
                # `turn` fails the request itself; whatever gets here is a fault of ours, and the thread serves others.
                logger.exception("room %d to %s: the mover's turn failed", destination.room, destination.peer.label)
