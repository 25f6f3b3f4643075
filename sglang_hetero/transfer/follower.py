"""Source side: one thread that tells how far forward passes have come, as soon as the device has come there.

The scheduler's thread only notes down that a layer has been enqueued, which is cheap; pieces are made and movers woken
here. What is noted on one stream completes in order, so waiting for the oldest note delays nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .device import Done, on_device
from .outbox import Chunk
from .pieces import COMPLETE, Mark

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0002
"""Between looks at a device that computes: a layer of a chunk takes milliseconds there."""
LOOK_SECONDS = 0.001
"""Between looks for the next layer of a pass that runs."""


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

    def __init__(self, name: str, side: Side, *, tells_end: bool, device: torch.device | None = None) -> None:
        """tells_end: whether a pass is over when its last note is due; otherwise somebody else tells.

        device: whose events the notes ask; None or a CPU for none.
        """
        self._side, self._tells_end, self._device = side, tells_end, device
        self._notes: deque[Note] = deque()
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._warned = False
        self.thread = threading.Thread(target=self._run, name=f"hetero-follower {name}", daemon=True)
        self.thread.start()

    def put(self, note: Note) -> None:
        """From the scheduler's thread, in the order of the forward passes.

        Waking a thread costs the scheduler more than anything else here, so it is done at the first note of a pass and
        the last one. In between the thread looks by itself.
        """
        first = not self._notes
        self._notes.append(note)
        if first or note.mark == COMPLETE:
            self._news.set()

    def stop(self) -> None:
        """End the thread; what is not due by then is not told."""
        self._stopped.set()
        self._news.set()

    def _run(self) -> None:
        if self._device is not None:
            on_device(self._device)
        running = False
        while not self._stopped.is_set():
            self._news.wait(LOOK_SECONDS if running else None)
            self._news.clear()
            while self._notes and not self._stopped.is_set():
                note = self._notes[0]
                if not self._due(note):
                    self._stopped.wait(POLL_SECONDS)
                    continue
                note = self._latest()
                running = note.mark != COMPLETE
                try:
                    self._tell(note)
                except BaseException:
                    self._failed()

    def _due(self, note: Note) -> bool:
        """A note that cannot be asked is told when the next one is, or at the end of the chunk by SGLang."""
        try:
            return note.due()
        except Exception:
            self._failed()
            self._notes.popleft()
            return False

    def _failed(self) -> None:
        # What is not told here goes at the end of the chunk.
        level = logging.DEBUG if self._warned else logging.ERROR
        logger.log(level, "a forward pass could not be followed; more of these are logged at DEBUG", exc_info=True)
        self._warned = True

    def _latest(self) -> Note:
        """Take the first note, or the last one of the same pass that is due: those between say nothing more."""
        note = self._notes.popleft()
        while self._notes and self._notes[0].begun is note.begun and self._due(self._notes[0]):
            note = self._notes.popleft()
        return note

    def _tell(self, note: Note) -> None:
        for each in note.begun:
            if self._tells_end and note.mark == COMPLETE:
                self._side.computed(each.room, last=each.chunk.last)
            self._side.reached(each.room, each.chunk, note.mark)
