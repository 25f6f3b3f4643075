"""Source side: from a request's pieces to one engine write, packed shares gathered first."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_hetero.device import Lane
from sglang_hetero.errors import HeteroError, StagingError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.merge.assemble import Memory, pack_pages
from sglang_hetero.perf.records import Component, component_of
from sglang_hetero.reshard.bind import Descriptors

from . import messages, verify
from .engine.asked import Unfinished
from .engine.base import Engine, EngineError
from .outbox import Destination, Ids
from .pieces import UNIT_OPTION, Part, Piece

logger = logging.getLogger(__name__)


class PackBuffers:
    """Registered memory into which shares are gathered that cannot be sent as they lie (P < D).

    One buffer per mover that is gathering; each is free again as soon as its engine write has returned.
    """

    def __init__(self, memory: torch.Tensor, buffer_bytes: int) -> None:
        """memory: uint8, one-dimensional, registered; it is cut into buffers of `buffer_bytes`."""
        self.buffer_bytes = buffer_bytes
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for start in range(0, memory.numel() - buffer_bytes + 1, buffer_bytes):
            self._free.put(memory[start : start + buffer_bytes])

    def take(self) -> torch.Tensor:
        """A buffer; waits for another mover's engine write at most."""
        return self._free.get()

    def give(self, buffer: torch.Tensor) -> None:
        """The bytes have been sent."""
        self._free.put(buffer)


class Batch:
    """Descriptors of several pieces on their way into one engine write; gathers packed shares as it goes."""

    def __init__(self, engine: Engine, session: str, memory: Memory, packs: PackBuffers, lane: Lane) -> None:
        self._engine, self._session, self._memory, self._packs, self._lane = engine, session, memory, packs, lane
        self._sources: list[Any] = []
        self._destinations: list[Any] = []
        self._sizes: list[Any] = []
        self._buffer: torch.Tensor | None = None
        self._used = 0
        self.descriptors: Counter[Component] = Counter()
        self.nbytes: Counter[Component] = Counter()

    def add(self, piece: Piece, parts: Sequence[tuple[Part, Descriptors]], pages: Ids, address: int) -> None:
        """Parts of one piece, to go to `address` in the peer's memory. pages: ids of the request at this source."""
        for part, moves in parts:
            if moves.packed:
                self._gather(piece, part, pages[piece.first_page : piece.first_page + piece.pages], address)
            else:
                self._append(piece, moves.source, moves.staged + np.uint64(address), moves.sizes)

    def _append(self, piece: Piece, sources: Any, destinations: Any, sizes: Any) -> None:
        self._sources.append(sources)
        self._destinations.append(destinations)
        self._sizes.append(sizes)
        component = component_of(piece.role)
        self.descriptors[component] += len(sizes)
        self.nbytes[component] += int(sizes.sum())

    def _gather(self, piece: Piece, part: Part, ids: Ids, address: int) -> None:
        """Gather a packed share run by run, each as many pages as the buffer still has room for."""
        share, memory = part.share, self._memory[part.share.role, part.layer]
        page_bytes = share.staged_bytes
        page_size = share.source_component.axis(AxisName.TOKEN).size
        done = 0
        while done < len(ids):
            if self._buffer is None:
                self._buffer, self._used = self._packs.take(), 0
            count = min(len(ids) - done, (self._packs.buffer_bytes - self._used) // page_bytes)
            if count == 0 and not self._used:
                raise StagingError(
                    f"a page of {share.role} has {page_bytes} bytes for this peer, a buffer to gather it in has "
                    f"{self._packs.buffer_bytes}; raise {UNIT_OPTION} on prefill"
                )
            if count == 0:
                self.flush()
                continue
            tokens = min(piece.tokens - done * page_size, count * page_size)
            room = self._buffer[self._used : self._used + count * page_bytes]
            with self._lane.active():
                pack_pages(share, memory, torch.from_numpy(ids[done : done + count]).to(room.device), tokens, room)
            size = (count - 1) * page_bytes + share.tail_bytes(tokens - (count - 1) * page_size)
            self._append(
                piece,
                np.array([room.data_ptr()], dtype=np.uint64),
                np.array([address + part.offset + done * page_bytes], dtype=np.uint64),
                np.array([size], dtype=np.uint64),
            )
            self._used += count * page_bytes
            done += count

    def flush(self) -> None:
        """Write what has been added, and wait until it is in the peer's memory. Raises EngineError."""
        try:
            if self._sizes:
                sizes = np.concatenate(self._sizes)
                sources, destinations = np.concatenate(self._sources), np.concatenate(self._destinations)
                self._engine.write(self._session, sources, destinations, sizes)
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what has been added and not been written."""
        self._sources, self._destinations, self._sizes = [], [], []
        if self._buffer is not None:
            self._packs.give(self._buffer)
            self._buffer = None


@dataclass(frozen=True)
class Written:
    """What became of a batch. problem: what went wrong, or an empty text; in_doubt: it may still land then."""

    pieces: tuple[messages.AnnouncedPiece, ...] = ()
    """Those that this source has a share of."""
    digests: tuple[bytes, ...] = ()
    descriptors: Mapping[Component, int] = field(default_factory=dict)
    nbytes: Mapping[Component, int] = field(default_factory=dict)
    started: float = 0.0
    """When the first byte was given to the engine, by time.monotonic(), and when the last one had landed."""
    ended: float = 0.0
    problem: str = ""
    in_doubt: bool = False
    unfinished: Unfinished | None = None
    """Where it is in doubt, but will be known."""


class Writer:
    """Writes batches of pieces to decode ranks; from any thread, several at a time."""

    def __init__(self, engine: Engine, memory: Memory, packs: PackBuffers, lane: Lane) -> None:
        """memory: of this rank's caches. lane: for gathering."""
        self._engine, self._memory, self._packs, self._lane = engine, memory, packs, lane

    def write(self, destination: Destination, batch: Sequence[tuple[int, Piece]], pages: Ids, slot: int) -> Written:
        """Write numbered pieces; returns when they lie in the peer's staging. pages, slot: of the request, here."""
        peer, side = destination.peer, destination.side
        out = Batch(self._engine, peer.session, self._memory, self._packs, self._lane)
        own = [(seq, piece) for seq, piece in batch if side.parts(piece)]
        started = time.monotonic()
        try:
            for seq, piece in own:
                out.add(piece, side.descriptors(piece, pages, slot), pages, destination.address(seq))
            out.flush()
            ended = time.monotonic()
            digests = self._digests(destination, own, pages, slot) if destination.verify else ()
        except EngineError as error:
            problem = f"could not write to {peer.label}: {error}"
            return Written(problem=problem, in_doubt=not error.settled, unfinished=error.unfinished)
        except HeteroError as error:
            return Written(problem=f"for {peer.label}: {error}")
        except Exception as error:
            logger.exception("room %d to %s", destination.room, peer.label)
            return Written(problem=f"for {peer.label}: {type(error).__name__}: {error}", in_doubt=True)
        finally:
            out.drop()
        return Written(_announced(own), digests, out.descriptors, out.nbytes, started, ended)

    def announced(
        self, destination: Destination, batch: Sequence[tuple[int, Piece]]
    ) -> tuple[messages.AnnouncedPiece, ...]:
        """Those of these pieces that this source has a share of."""
        return _announced([(seq, piece) for seq, piece in batch if destination.side.parts(piece)])

    def digests_of(
        self, destination: Destination, batch: Sequence[tuple[int, Piece]], pages: Ids, slot: int
    ) -> tuple[tuple[messages.AnnouncedPiece, ...], tuple[bytes, ...]]:
        """Those of these pieces that this source has a share of, and the digests of its shares."""
        own = [(seq, piece) for seq, piece in batch if destination.side.parts(piece)]
        return _announced(own), self._digests(destination, own, pages, slot)

    def _digests(
        self, destination: Destination, own: Sequence[tuple[int, Piece]], pages: Ids, slot: int
    ) -> tuple[bytes, ...]:
        side = destination.side
        return tuple(
            verify.source_digests(side.plan, side.source, piece, self._memory, pages, slot) for _, piece in own
        )


def _announced(own: Sequence[tuple[int, Piece]]) -> tuple[messages.AnnouncedPiece, ...]:
    return tuple(
        messages.AnnouncedPiece(seq, piece.role, piece.layer, piece.first_page, piece.pages, piece.tokens)
        for seq, piece in own
    )
