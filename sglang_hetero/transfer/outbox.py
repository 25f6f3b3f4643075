"""Source side, one request: its pieces on the way to each decode rank. No threads of its own, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_hetero.errors import ProtocolError
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.manifest import Coordinates, Manifest
from sglang_hetero.reshard.plan import Plan, plan

from . import messages
from .device import Done, at_once
from .lifetime import Sending, SendingStatus
from .link import Endpoint
from .pieces import Piece, SourceSide, StageProgram, StateMode

if TYPE_CHECKING:
    from .mover import Mover

Ids = npt.NDArray[np.int64]


@dataclass
class Peer:
    """One decode rank, as it registered: where its staging lies and how it is reached."""

    incarnation: str
    manifest: Manifest
    endpoint: Endpoint
    session: str
    arena: int
    """Address of its staging arena in its own memory."""
    arena_bytes: int
    identity: bytes
    """Under which the control service reaches it."""
    plan: Plan | None = None
    side: SourceSide | None = None
    programs: dict[tuple[tuple[tuple[Role, int], ...], StateMode], StageProgram] = field(default_factory=dict)
    mover: Mover | None = None

    @property
    def label(self) -> str:
        return self.manifest.label

    @property
    def place(self) -> tuple[str, Coordinates]:
        """Server and rank: a process at the same place has taken this one's."""
        return self.manifest.host, self.manifest.coordinates

    def program(self, stage: int, pages_per_piece: Mapping[Role, int], mode: StateMode) -> StageProgram:
        """The sequence of one stage for this destination; the plan must have been made."""
        assert self.plan is not None
        key = (tuple(sorted(pages_per_piece.items())), mode)
        if key not in self.programs:
            self.programs[key] = StageProgram(self.plan, stage, pages_per_piece, mode)
        return self.programs[key]

    def prepare(self, sources: tuple[Manifest, ...], number: int) -> tuple[Plan, SourceSide]:
        """The plan for this destination and what source `number` of it sends, made once. Raises HeteroError."""
        if self.plan is None or self.side is None:
            self.plan = plan(sources, self.manifest)
            self.side = SourceSide(self.plan, number)
        return self.plan, self.side


@dataclass(frozen=True)
class Chunk:
    """One send_kv_chunk call of SGLang's scheduler: pages count from the start of the request."""

    first_page: int
    pages: int
    tokens: int
    last: bool
    ready: Done = at_once
    """When the source's caches hold it; the scheduler need not wait for that."""


@dataclass
class Destination:
    """One request on its way to one decode rank."""

    peer: Peer
    room: int
    epoch: int
    rank: int
    side: SourceSide
    program: StageProgram
    units: tuple[int, ...]
    """Offsets in the peer's arena of the request's window for this stage."""
    area_offset: int
    area_bytes: int
    verify: bool
    sending: Sending
    sequence: list[Piece] = field(default_factory=list)
    """Pieces in order; the number of a piece is its index."""
    taken: int = 0
    """How many of them have been taken for writing."""
    total_told: bool = False
    """Whether the peer knows how many there are."""
    chunks: int = 0
    """How many of the request's chunks are in `sequence`."""
    queued: bool = False
    """Whether the peer's mover has it on its list."""
    aborted: bool = False
    """Whether the peer has said that it gives the request up."""
    goodbye: bool = False
    """Whether `Drained` has to be told once no write is in flight."""

    @property
    def owes_total(self) -> bool:
        """Whether all is written and only the number of pieces has not been told."""
        sending = self.sending
        all_taken = sending.total is not None and self.taken == sending.total and not sending.in_flight
        return all_taken and not self.total_told and sending.status is SendingStatus.SENDING

    def address(self, seq: int) -> int:
        """Where piece `seq` of this source goes, in the peer's memory."""
        return self.peer.arena + self.units[seq % len(self.units)] + self.area_offset


@dataclass
class Outbox:
    """One request at a source rank."""

    room: int
    expected: int
    """Number of decode ranks that bind it."""
    destinations: dict[int, Destination] = field(default_factory=dict)
    """By decode rank."""
    chunks: list[Chunk] = field(default_factory=list)
    pages: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Ids of the request's pages so far, in this rank's pool."""
    slot: int = -1
    """Its linear-state slot here; -1 before the last chunk and for models without one."""
    progress: float = 0.0
    """When something last happened, on the clock of the side."""
    ended: bool = False
    reason: str | None = None
    """Why it failed; None if it has not."""

    @property
    def bound(self) -> bool:
        return len(self.destinations) == self.expected

    @property
    def closed(self) -> bool:
        """Whether the scheduler has handed the last chunk over."""
        return bool(self.chunks) and self.chunks[-1].last

    @property
    def tokens(self) -> int:
        """Of the prompt, as far as it has been computed."""
        return sum(chunk.tokens for chunk in self.chunks)

    def extend(self, destination: Destination) -> None:
        """Bring a destination's sequence up to the chunks that are complete in this rank's memory."""
        while destination.chunks < len(self.chunks):
            chunk = self.chunks[destination.chunks]
            if not chunk.ready():
                return
            pieces = destination.program.chunk(chunk.first_page, chunk.pages, chunk.tokens, last=chunk.last)
            destination.sequence.extend(pieces)
            skipped = [index for index, piece in enumerate(pieces) if not destination.side.parts(piece)]
            destination.sending.produced(len(pieces), skipped)
            destination.chunks += 1
            if chunk.last:
                destination.sending.close()


def destination_of(message: messages.Bind, peer: Peer, sources: tuple[Manifest, ...], number: int) -> Destination:
    """Where a decode rank wants a request to go, from what it says and from our own plan.

    sources: all ranks of the prefill replica; number: of this one. Raises HeteroError, naming both sides, where they
    do not mean the same or the window does not lie in the peer's arena.
    """
    made, side = peer.prepare(sources, number)
    own = sources[number]
    fingerprint = made.fingerprint_of(number)
    if fingerprint != message.fingerprint:
        raise ProtocolError(
            f"{own.label} and {peer.label} do not plan the same: {fingerprint} against {message.fingerprint}; install "
            "the same release of sglang-hetero on both sides"
        )
    end = max(message.units, default=0) + message.area_offset + message.area_bytes
    if not message.units or end > peer.arena_bytes:
        raise ProtocolError(f"{peer.label}: the window ends at byte {end} of an arena of {peer.arena_bytes}")
    need = side.area_bytes(message.pages_per_piece)
    if need > message.area_bytes:
        raise ProtocolError(f"{peer.label}: {own.label} has {message.area_bytes} bytes of each unit, it sends {need}")
    return Destination(
        peer,
        message.room,
        message.epoch,
        message.rank,
        side,
        peer.program(own.coordinates.pp_rank, message.pages_per_piece, message.mode),
        tuple(message.units),
        message.area_offset,
        message.area_bytes,
        message.verify,
        Sending(len(message.units)),
    )
