"""Destination side: from a request's units into this rank's caches, and the thread that does it for attention KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sglang_hetero.device import on_device
from sglang_hetero.merge.assemble import Assembler, Memory
from sglang_hetero.merge.batch import Staged
from sglang_hetero.perf.records import Component, component_of

from . import verify
from .inbox import Arrived, Inbox
from .lines import Lines
from .worker import Worker

logger = logging.getLogger(__name__)

MAX_BATCH = 8
"""Pieces that are merged before they are acknowledged; the sources fill other units meanwhile."""


class Place:
    """A byte of the arena in the place of a view of it: a slice of it begins where the slice of the view would."""

    __slots__ = ("byte",)

    def __init__(self, byte: int) -> None:
        self.byte = byte

    def __getitem__(self, where: slice, /) -> Place:
        return Place(self.byte + where.start)


def merge(arena: torch.Tensor, assembler: Assembler, inbox: Inbox, batch: Sequence[Arrived]) -> None:
    """Move pieces of one request into its pages and the slot, all in one call. Raises MergeError before any moves."""
    destination = inbox.source_set.destination
    staged = []
    for arrived in batch:
        units, piece = inbox.units[arrived.stage], arrived.piece
        if piece.role is None:
            ids = np.array([inbox.slot], dtype=np.int64)
        else:
            ids = inbox.pages[piece.first_page : piece.first_page + piece.pages]
        for role, places in destination.areas(piece, Place(units[arrived.unit % len(units)])):
            areas = {source: place.byte for source, place in places.items()}
            staged.append(Staged(role, piece.layer, ids, piece.tokens, areas))
    assembler.merge_batch(arena, staged)


def differences(memory: Memory, inbox: Inbox, arrived: Arrived, said: Mapping[int, bytes]) -> str:
    """What differs between what a piece's sources say that their bytes are and the caches here, or an empty text.

    said: digests by source number. The piece has been merged.
    """
    plan, piece = inbox.source_set.plan, arrived.piece
    own = verify.destination_digests(plan, piece, memory, inbox.pages, inbox.slot)
    found = verify.compare(plan, piece, said, own)
    return f"{piece} differs from what prefill has: {found}" if found else ""


def measured(inbox: Inbox, batch: Sequence[Arrived], seconds: float) -> None:
    """A batch has been merged in so many seconds. Never raises: the bytes are there, whatever is counted."""
    try:
        _measure(inbox, batch, seconds)
    except Exception:
        logger.exception("room %d: the figures of a merge", inbox.room)


def _measure(inbox: Inbox, batch: Sequence[Arrived], seconds: float) -> None:
    """Each component's part of the seconds is as its part of the bytes."""
    destination = inbox.source_set.destination
    found: dict[Component, list[int]] = {}
    for arrived in batch:
        found.setdefault(component_of(arrived.piece.role), []).append(destination.nbytes(arrived.piece))
    left = sum(sum(sizes) for sizes in found.values())
    per_byte = seconds / left if left else 0.0
    for component, sizes in found.items():  # one after the other, so that a trace draws them so
        nbytes = sum(sizes)
        left -= nbytes
        inbox.perf.merged(component, nbytes, nbytes * per_byte, len(sizes), ago=left * per_byte)


class MergeWorker:
    """A thread that merges what is put on its list, several pieces of one request at once; requests take turns."""

    def __init__(
        self,
        name: str,
        merge_batch: Callable[[Inbox, Sequence[Arrived]], None],
        failed: Callable[[Inbox, str], None],
        device: torch.device,
    ) -> None:
        """merge_batch: merges, and fails the request itself. failed: fails it when merge_batch has raised. device: the
        rank's."""
        self._merge_batch, self._failed, self._device, self._fault = merge_batch, failed, device, ""
        self._todo: Lines[Inbox, Arrived] = Lines()
        self.worker = Worker(f"hetero-merger {name}", self._run)

    def put(self, inbox: Inbox, arrived: Arrived) -> None:
        """Merge this piece; from any thread."""
        self._todo.put(inbox, arrived)

    @property
    def fault(self) -> str:
        """That a merge's end was lost, so that its units may never come home, or that the thread has ended, and why.

        An empty text if neither."""
        return self.worker.fault or self._fault

    def stop(self) -> None:
        """End the thread after what is on the list."""
        self.worker.stop()
        self._todo.stop()

    def _run(self) -> None:
        on_device(self._device)
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One batch; False when there will be no more. What it worked on is referred to by nothing afterwards."""
        found = self._todo.take(MAX_BATCH)
        if found is None:
            return False
        inbox, batch = found
        try:
            self._merge_batch(inbox, batch)
        except BaseException as error:
            # What gets here is a fault of ours, and the thread serves others.
            self._fault = f"the end of a merge was not told: {type(error).__name__}: {error}"
            logger.critical("room %d: the merge worker's turn failed", inbox.room, exc_info=True)
            try:
                self._failed(inbox, self._fault)
            except BaseException:
                logger.critical("room %d: nor can the request be failed", inbox.room, exc_info=True)
        return True
