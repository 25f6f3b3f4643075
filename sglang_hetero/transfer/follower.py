"""Source side: one thread that tells how far forward passes have come, as soon as the device has come there.

The scheduler's thread only notes down that a layer has been enqueued, which is cheap; pieces are made and movers woken
here. What is noted on one stream completes in order, so waiting for the oldest note delays nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .device import Done
from .outbox import Chunk
from .pieces import COMPLETE, Mark

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0002
"""Between looks at a device that computes: a layer of a chunk takes milliseconds there."""


@dataclass(frozen=True)
class Begun:
    """One request's part of a forward pass."""

    room: int
    chunk: Chunk


@dataclass(frozen=True)
class Note:
    """The requests of one forward pass have come to `mark` when `done` says so."""

    begun: Sequence[Begun]
    mark: Mark
    done: Done

    def due(self) -> bool:
        """Whether the device is there, and the requests' places are known; never blocks."""
        return self.done() and all(
            each.chunk.placed is None or each.chunk.placed.ready() for each in self.begun
        )  # the side clears `placed` on this thread only


class Side(Protocol):
    """What is told of each request: how far it has come, and, for the figures, that its pass is over."""

    def reached(self, room: int, chunk: Chunk, mark: Mark) -> None: ...

    def computed(self, room: int, *, last: bool) -> None: ...


class Follower:
    """The thread of one prefill rank."""

    def __init__(self, name: str, side: Side, *, tells_end: bool) -> None:
        """tells_end: whether a pass is over when its last note is due; otherwise somebody else tells."""
        self._side, self._tells_end = side, tells_end
        self._notes: queue.SimpleQueue[Note | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._next: Note | None = None
        self.thread = threading.Thread(target=self._run, name=f"hetero-follower {name}", daemon=True)
        self.thread.start()

    def put(self, note: Note) -> None:
        """From the scheduler's thread, in the order of the forward passes."""
        self._notes.put(note)

    def stop(self) -> None:
        """End the thread; what is not due by then is not told."""
        self._stopped.set()
        self._notes.put(None)

    def _run(self) -> None:
        while (note := self._take()) is not None and not self._stopped.is_set():
            try:
                while not note.due():
                    if self._stopped.wait(POLL_SECONDS):
                        return
                note = self._latest(note)
                for each in note.begun:
                    if self._tells_end and note.mark == COMPLETE:
                        self._side.computed(each.room, last=each.chunk.last)
                    self._side.reached(each.room, each.chunk, note.mark)
            except BaseException:
                # What is not told here goes at the end of the chunk.
                logger.exception("a forward pass could not be followed")

    def _take(self) -> Note | None:
        note, self._next = self._next, None
        return note or self._notes.get()

    def _latest(self, note: Note) -> Note:
        """The last note of the same forward pass that is due by now; those between say nothing more."""
        while not self._notes.empty():
            following = self._notes.get()
            if following is None or following.begun is not note.begun or not following.due():
                self._next = following
                if following is None:
                    self._notes.put(None)
                return note
            note = following
        return note
