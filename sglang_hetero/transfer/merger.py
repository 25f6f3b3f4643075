"""Destination side: from a request's units into this rank's caches, and the thread that does it for attention KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sglang_hetero.merge.assemble import Assembler, Memory
from sglang_hetero.merge.batch import Staged

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


class MergeWorker:
    """A thread that merges what is put on its list, several pieces of one request at once; requests take turns."""

    def __init__(self, name: str, merge_batch: Callable[[Inbox, Sequence[Arrived]], None]) -> None:
        self._merge_batch = merge_batch
        self._todo: Lines[Inbox, Arrived] = Lines()
        self.worker = Worker(f"hetero-merger {name}", self._run)

    def put(self, inbox: Inbox, arrived: Arrived) -> None:
        """Merge this piece; from any thread."""
        self._todo.put(inbox, arrived)

    def stop(self) -> None:
        """End the thread after what is on the list."""
        self.worker.stop()
        self._todo.stop()

    def _run(self) -> None:
        while (found := self._todo.take(MAX_BATCH)) is not None:
            inbox, batch = found
            try:
                self._merge_batch(inbox, batch)
            except BaseException:
                # merge_batch fails the request itself; what gets here is a fault of ours, and the thread serves others.
                logger.exception("room %d: the merge worker's turn failed", inbox.room)
