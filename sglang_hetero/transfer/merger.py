"""Destination side: from a request's units into this rank's caches, and the thread that does it for attention KV."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from sglang_hetero.layout.component import Item
from sglang_hetero.merge.assemble import Assembler, Memory

from . import verify
from .inbox import Arrived, Inbox

logger = logging.getLogger(__name__)

STOP = None
MAX_BATCH = 8
"""Pieces that are merged before they are acknowledged; the sources fill other units meanwhile."""


def merge(arena: torch.Tensor, assembler: Assembler, inbox: Inbox, arrived: Arrived) -> None:
    """Move one piece into its pages or the slot. Raises MergeError."""
    units = inbox.units[arrived.stage]
    start = units[arrived.unit % len(units)]
    piece = arrived.piece
    unit = arena[start : start + inbox.source_set.window.unit_bytes]
    for role, areas in inbox.source_set.destination.areas(piece, unit):
        if assembler.item(role, piece.layer) is Item.PAGE:
            pages = inbox.page_tensor[piece.first_page : piece.first_page + piece.pages]
            assembler.merge_pages(role, piece.layer, pages, piece.tokens, areas)
        else:
            assert inbox.slot_tensor is not None
            assembler.merge_slot(role, piece.layer, inbox.slot_tensor, areas)


def differences(memory: Memory, inbox: Inbox, arrived: Arrived, said: Mapping[int, bytes]) -> str:
    """What differs between what a piece's sources say that their bytes are and the caches here, or an empty text.

    said: digests by source number. The piece has been merged.
    """
    plan, piece = inbox.source_set.plan, arrived.piece
    own = verify.destination_digests(plan, piece, memory, inbox.pages, inbox.slot)
    found = verify.compare(plan, piece, said, own)
    return f"{piece} differs from what prefill has: {found}" if found else ""


class MergeWorker:
    """A thread that merges what is put on its list, the pieces of one request that lie next to each other at once."""

    def __init__(self, name: str, merge_batch: Callable[[Inbox, Sequence[Arrived]], None]) -> None:
        self._merge_batch = merge_batch
        self._todo: queue.SimpleQueue[tuple[Inbox, Arrived] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"hetero-merger {name}", daemon=True)
        self.thread.start()

    def put(self, inbox: Inbox, arrived: Arrived) -> None:
        """Merge this piece; from any thread."""
        self._todo.put((inbox, arrived))

    def stop(self) -> None:
        """End the thread after what is on the list."""
        self._todo.put(STOP)

    def _run(self) -> None:
        following: tuple[Inbox, Arrived] | None = None
        while True:
            first = following or self._todo.get()
            following = None
            if first is STOP:
                return
            inbox, batch = first[0], [first[1]]
            while len(batch) < MAX_BATCH and not self._todo.empty():
                more = self._todo.get()
                if more is None or more[0] is not inbox:
                    following = more
                    if more is STOP:
                        self._todo.put(STOP)
                    break
                batch.append(more[1])
            try:
                self._merge_batch(inbox, batch)
            except BaseException:
                # merge_batch fails the request itself; what gets here is a fault of ours, and the thread serves others.
                logger.exception("room %d: the merge worker's turn failed", inbox.room)
