"""Destination side, mode pull: read what was not pushed from the sources' caches into the request's units.

Batch by batch: as many pieces as the window has units are read from all sources, then merged, then the next ones.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_hetero.device import on_device

from .engine.base import Engine, EngineError
from .inbox import Arrived, Inbox
from .outbox import Ids

logger = logging.getLogger(__name__)

Read = tuple[int, Any, Any, Any]
"""Number of a source, and where from, where to and how many bytes: arrays of uint64."""


def pieces_to_read(inbox: Inbox) -> deque[Arrived]:
    """Everything that mode pull reads of a request, in pieces that fit a unit, numbered per stage."""
    assert inbox.first is not None
    found: deque[Arrived] = deque()
    for stage, program in enumerate(inbox.programs):
        for number, piece in enumerate(program.reads(inbox.first.tokens)):
            found.append(Arrived(stage, number, piece, pulled=True))
    return found


def next_batch(todo: deque[Arrived], units: Sequence[Sequence[int]]) -> list[Arrived]:
    """The next pieces that have a unit each: at most a window's of one stage."""
    batch: list[Arrived] = []
    while (
        todo
        and todo[0].stage == (batch[0].stage if batch else todo[0].stage)
        and len(batch) < len(units[todo[0].stage])
    ):
        batch.append(todo.popleft())
    return batch


def reads_of(inbox: Inbox, batch: Sequence[Arrived], arena: int, pages: Ids, slot: int) -> list[Read]:
    """What to read from each source; pages and slot: at the sources. arena: address of the staging memory."""
    window = inbox.source_set.window
    found: dict[int, list[tuple[Any, Any, Any]]] = {}
    for arrived in batch:
        units = inbox.units[arrived.stage]
        unit = arena + units[arrived.unit % len(units)]
        for side in inbox.source_set.sides:
            for _, moves in side.descriptors(arrived.piece, pages, slot):
                area = np.uint64(unit + window.areas[side.source][0])
                found.setdefault(side.source, []).append((moves.source, moves.staged + area, moves.sizes))
    reads: list[Read] = []
    for source, parts in sorted(found.items()):
        remote, local, sizes = (np.concatenate([part[which] for part in parts]) for which in range(3))
        reads.append((source, remote, local, sizes))
    return reads


@dataclass(frozen=True)
class Outcome:
    """How a read ended. problem: what went wrong, or an empty text; in_doubt: bytes may still arrive then."""

    problem: str = ""
    in_doubt: bool = False


Report = Callable[[Inbox, int, Outcome], None]
"""Told of every read that has ended, with the number of the source."""


class Puller:
    """Runs reads on threads and reports each."""

    def __init__(self, engine: Engine, executor: Executor, device: torch.device) -> None:
        """device: the rank's."""
        self._engine, self._executor, self._device = engine, executor, device
        self.fault = ""
        """That the end of a read could not be told, and why: its request waits for it for ever. Else an empty text."""

    def start(self, inbox: Inbox, reads: Sequence[Read], done: Report) -> tuple[int, str]:
        """Begin to read; `done` is told of each source.

        Returns how many reads were begun, and why the others were not, or an empty text. Of those nothing arrives, and
        `done` is not told of them.
        """
        for number, read in enumerate(reads):
            claim = threading.Lock()
            try:
                self._executor.submit(self._read, inbox, read, done, claim)
            except Exception as error:  # no more threads, or the executor is shut down
                # An executor that cannot start a thread has put the task on its list nevertheless, and another thread
                # of it may run it: whoever has the claim decides.
                begun = number + (not claim.acquire(blocking=False))
                return begun, f"a read could not be begun: {type(error).__name__}: {error}"
        return len(reads), ""

    def _read(self, inbox: Inbox, read: Read, done: Report, claim: threading.Lock) -> None:
        """claim: whoever gets it first decides whether this read takes place; it is never released."""
        if not claim.acquire(blocking=False):
            return
        source, remote, local, sizes = read
        outcome = Outcome()
        try:
            on_device(self._device)  # the executor's threads come and go
            self._engine.read(inbox.source_set.sessions[source], local, remote, sizes)
        except Exception as error:
            label = inbox.source_set.sources[source].label
            settled = isinstance(error, EngineError) and error.settled
            outcome = Outcome(f"could not read from {label}: {type(error).__name__}: {error}", not settled)
        try:
            done(inbox, source, outcome)
        except BaseException as error:
            # Nobody looks at what an executor's task raises.
            self.fault = f"the end of a read was not told: {type(error).__name__}: {error}"
            logger.critical("room %d: %s", inbox.room, self.fault, exc_info=True)

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
