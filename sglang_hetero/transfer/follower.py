"""Source side: one thread that tells how far forward passes have come, as soon as the device has come there.

The scheduler's thread only notes down that a layer has been enqueued, which is cheap; pieces are made and movers woken
here. What is noted on one stream completes in order, so waiting for the oldest note delays nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_hetero.device import Done, on_device

from .outbox import Chunk, Move, Placed
from .pieces import COMPLETE, Mark
from .worker import Worker

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0002
"""Between looks at a device that computes: a layer of a chunk takes milliseconds there."""
LOOK_SECONDS = 0.001
"""Between looks for the next layer of a pass that runs."""
PASS_SECONDS = 10.0
"""Without a word for so long no pass runs any more."""


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
        # The side clears `placed` on this thread only.
        return self.done() and all(each.chunk.placed is None or each.chunk.placed.ready() for each in self.begun)

    def same_pass(self, other: Note | Located) -> bool:
        """Whether the other one is of the same forward pass, so that the later one says all."""
        return isinstance(other, Note) and other.begun is self.begun


@dataclass(frozen=True)
class Located:
    """Where a request is after a move, when it can be read."""

    room: int
    move: Move
    placed: Placed

    def due(self) -> bool:
        """Whether it can."""
        return self.placed.ready()

    def same_pass(self, other: Note | Located) -> bool:
        """Never: each is to be told."""
        return False


class Side(Protocol):
    """What is told of each request: how far it has come, where it is, and, for the figures, that its pass is over."""

    def reached(self, room: int, chunk: Chunk, mark: Mark) -> None: ...

    def locate(self, room: int, move: Move, placed: Placed) -> None: ...

    def computed(self, room: int, *, last: bool) -> None: ...


class Follower:
    """The thread of one prefill rank."""

    def __init__(self, name: str, side: Side, *, tells_end: bool, device: torch.device | None = None) -> None:
        """tells_end: whether a pass is over when its last note is due; otherwise somebody else tells.

        device: whose events the notes ask; None or a CPU for none.
        """
        self._side, self._tells_end, self._device = side, tells_end, device
        self._notes: deque[Note | Located] = deque()
        self._news = threading.Event()
        self._asleep = False
        self._stopped = threading.Event()
        self._warned = False
        self.worker = Worker(f"hetero-follower {name}", self._run)

    def put(self, note: Note | Located) -> None:
        """From the scheduler's thread, in the order of what it sees.

        Waking a thread costs the scheduler more than anything else here, so it is done when the thread sleeps, and for
        what nothing follows soon. In between the thread looks by itself.
        """
        self._notes.append(note)
        if self._asleep or isinstance(note, Located) or note.mark == COMPLETE:
            self._news.set()

    def stop(self) -> None:
        """End the thread; what is not due by then is not told."""
        self.worker.stop()
        self._stopped.set()
        self._news.set()

    def _run(self) -> None:
        if self._device is not None:
            on_device(self._device)
        looks_until = 0.0
        while not self._stopped.is_set():
            self._wait(looks=time.monotonic() < looks_until)
            while self._notes and not self._stopped.is_set():
                if not self._due(self._notes[0]):
                    self._stopped.wait(POLL_SECONDS)
                    continue
                note = self._latest()
                running = isinstance(note, Note) and note.mark != COMPLETE
                looks_until = time.monotonic() + PASS_SECONDS if running else 0.0
                self._tell(note)

    def _wait(self, *, looks: bool) -> None:
        """Until there may be a note. looks: one may come without a word."""
        if looks:
            self._news.wait(LOOK_SECONDS)
        else:
            self._asleep = True  # who puts a note from here on says so; what was put before is seen here
            if not self._notes:
                self._news.wait()
            self._asleep = False
        self._news.clear()

    def _due(self, note: Note | Located) -> bool:
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

    def _latest(self) -> Note | Located:
        """Take the first note, or the last one of the same pass that is due: those between say nothing more."""
        note = self._notes.popleft()
        while self._notes and note.same_pass(self._notes[0]) and self._due(self._notes[0]):
            note = self._notes.popleft()
        return note

    def _tell(self, note: Note | Located) -> None:
        if isinstance(note, Located):
            self._guarded(self._side.locate, note.room, note.move, note.placed)
            return
        for each in note.begun:
            if self._tells_end and note.mark == COMPLETE:
                self._guarded(self._side.computed, each.room, last=each.chunk.last)
            self._guarded(self._side.reached, each.room, each.chunk, note.mark)

    def _guarded(self, tell: Callable[..., None], *what: object, **more: object) -> None:
        try:
            tell(*what, **more)
        except BaseException:
            self._failed()
