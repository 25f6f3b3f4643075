"""Source side, one request: its pieces on the way to each decode rank. No threads of its own, no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_hetero.device import Done, HostCopy, at_once
from sglang_hetero.errors import ProtocolError
from sglang_hetero.layout.component import Role
from sglang_hetero.layout.manifest import Coordinates, Manifest
from sglang_hetero.perf.records import SentRecord, unlooked
from sglang_hetero.reshard.plan import Plan, plan

from . import messages
from .lifetime import Repetition, Sending, SendingStatus, Stillness
from .link import Endpoint
from .pieces import COMPLETE, NOTHING, Mark, Piece, SourceSide, StageProgram, StateMode

if TYPE_CHECKING:
    from .engine.asked import Unfinished
    from .mover import Mover

Ids = npt.NDArray[np.int64]
MAX_PROGRAMS = 8
"""Sequences that are kept for a decode rank: it cuts all its requests alike, in one mode."""


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
    heard: float = float("-inf")
    """When it last said anything, time.monotonic()."""

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
            while len(self.programs) >= MAX_PROGRAMS:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = StageProgram(self.plan, stage, pages_per_piece, mode)
        return self.programs[key]

    def prepare(self, sources: tuple[Manifest, ...], number: int) -> tuple[Plan, SourceSide]:
        """The plan for this destination and what source `number` of it sends, made once. Raises HeteroError."""
        if self.plan is None or self.side is None:
            self.plan = plan(sources, self.manifest)
            self.side = SourceSide(self.plan, number)
        return self.plan, self.side


REPORT = (
    "start prefill with SGLANG_HETERO_LAYERWISE=0 and --disable-radix-cache, and report this with the versions of "
    "SGLang and sglang-hetero"
)
"""What to do where SGLang does something that this release does not know of."""


def covered(end: int, page_size: int, *, last: bool) -> int:
    """Pages that are complete when the prompt has been computed up to token `end`, as send_kv_chunk counts them.

    Full ones only, unless it is the prompt's last token.
    """
    return -(-end // page_size) if last else end // page_size


@dataclass(frozen=True)
class FirstToken:
    """What decode needs beside the caches to go on with a request: the token and the rows of SGLang's metadata."""

    token: int
    aux: tuple[bytes, ...]
    tokens: int
    """Length of the prompt."""


@dataclass(frozen=True)
class Placed:
    """Where the source keeps a request, from its start to the end of a chunk that the model computes now.

    ids: of its pages; slot: of its linear state, None but with the last chunk. Both may still be on their way to the
    host.
    """

    ids: HostCopy
    slot: HostCopy | None = None

    def ready(self) -> bool:
        """Whether they can be read."""
        return self.ids.ready() and (self.slot is None or self.slot.ready())


@dataclass(frozen=True)
class Move:
    """SGLang may be moving a request: which move it is, and how many of its pages have a place."""

    leaves: int
    pages: int


@dataclass(eq=False)
class Chunk:
    """A run of the prompt that the model computes at once: pages count from the start of the request.

    What SGLang's send_kv_chunk says is what holds. A chunk that was begun before is the same one, or the request fails.
    """

    first_page: int
    pages: int
    tokens: int
    last: bool
    ready: Done = at_once
    """When the source's caches hold all of it, once it was handed over; the scheduler need not wait for that."""
    handed_over: bool = True
    """Whether send_kv_chunk was called for it."""
    reached: Mark = NOTHING
    """How far the model had come with it when we last looked."""
    placed: Placed | None = None
    """Of a chunk that was begun, until the ids have been read."""
    leaves: int = 0
    """Outbox.leaves when it was begun: `placed` is of that time."""

    @property
    def end_page(self) -> int:
        return self.first_page + self.pages

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        return self.first_page, self.pages, self.tokens, self.last

    def look(self) -> Mark:
        """How far the model has come with it by now."""
        if self.handed_over and self.reached != COMPLETE and self.ready():
            self.reached = COMPLETE
        return self.reached

    def __str__(self) -> str:
        return f"pages {self.first_page} to {self.end_page - 1} ({self.tokens} tokens{', the last' * self.last})"


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
    total_told: bool = False
    """Whether the peer knows how many there are."""
    chunks: int = 0
    """How many of the request's chunks are in `sequence` as a whole."""
    entries: int = 0
    """How many entries of the next one are in it (StageProgram.part)."""
    queued: bool = False
    """Whether the peer's mover has it on its list."""
    left: bool = False
    """Whether the peer has said that it is done with the request, well or not: it reads nothing of it any more."""
    perf: SentRecord = field(default_factory=unlooked)
    """Of the request."""
    goodbye: bool = False
    """Whether `Drained` has to be told once no write is in flight."""
    unfinished: Unfinished | None = None
    """Of a write that was given up: who will say when nothing of it can arrive any more."""
    again: bool = False
    """Whether what was announced and is not acknowledged has to be announced again."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Incarnation of the decode process, room and epoch: what its messages say."""
        return self.peer.incarnation, self.room, self.epoch

    @property
    def runnable(self) -> bool:
        """Whether its mover has anything to do for it."""
        return self.sending.runnable or self.owes_total or self.owes_repetition

    @property
    def has_said(self) -> bool:
        """Whether there is anything that a lost message may have told."""
        return self.total_told or bool(self.sending.announced)

    @property
    def owes_repetition(self) -> bool:
        return self.again and self.sending.status is SendingStatus.SENDING

    @property
    def owes_total(self) -> bool:
        """Whether all is written and only the number of pieces has not been told."""
        sending = self.sending
        all_taken = sending.total is not None and sending.taken == sending.total and not sending.in_flight
        return all_taken and not self.total_told and sending.status is SendingStatus.SENDING

    @property
    def untaken(self) -> int:
        """Pieces there are that have not been taken for writing."""
        return len(self.sequence) - self.sending.taken

    def fitting(self, nbytes: int) -> int:
        """How many of the next pieces are together at most so many bytes of this source, at least 1.

        A window holds the most there can be.
        """
        count = total = 0
        for piece in self.sequence[self.sending.taken : self.sending.taken + len(self.units)]:
            total += self.side.nbytes(piece)
            if total > nbytes:
                break
            count += 1
        return max(1, count)

    def address(self, seq: int) -> int:
        """Where piece `seq` of this source goes, in the peer's memory."""
        return self.peer.arena + self.units[seq % len(self.units)] + self.area_offset


@dataclass
class Outbox:
    """One request at a source rank."""

    room: int
    expected: int
    """Number of decode ranks that bind it."""
    use: str = ""
    """Names this use of the room (Bind.use); empty if nobody has bound it."""
    owner: Callable[[], object | None] | None = None
    """Gives SGLang's sender of the request, None when that is gone; None while there is none."""
    destinations: dict[int, Destination] = field(default_factory=dict)
    """By decode rank."""
    chunks: list[Chunk] = field(default_factory=list)
    pages: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Ids of the request's pages so far, in this rank's pool."""
    slot: int = -1
    """Its linear-state slot here; -1 before the last chunk and for models without one."""
    leaves: int = 0
    """How often SGLang may have moved the request."""
    moves: int = 0
    """The same, and how often it turned out where: what was read meanwhile may have been somebody else's."""
    moving: bool = False
    """Whether it may have, and has not said yet where the request is now: nothing is read, nobody is told where."""
    first: FirstToken | None = None
    """What waits for that to be told."""
    told: messages.FirstGeneration | None = None
    """What this rank has told of the first token, to be told again."""
    progress: float = 0.0
    """When something new last happened, on the clock of the side."""
    repetition: Repetition = field(default_factory=Repetition)
    stillness: Stillness = field(default_factory=Stillness)
    perf: SentRecord = field(default_factory=unlooked)
    """Where its figures are kept."""
    ended: bool = False
    reason: str | None = None
    """Why it failed; None if it has not."""
    told_end: bool = True
    """False from its failure until every decode rank has been told: SGLang may not know before, or what other ranks of
    this server say when it lets go of the request reaches decode before the cause."""

    @property
    def bound(self) -> bool:
        """Whether every decode rank has told where the request goes; never of one that ended before any had."""
        return 0 < len(self.destinations) == self.expected

    @property
    def finished(self) -> bool:
        """Whether every decode rank has everything."""
        return self.bound and all(each.sending.status is SendingStatus.FINISHED for each in self.destinations.values())

    def waits_for(self) -> str:
        """The decode ranks that do not have everything."""
        destinations = list(self.destinations.values())
        return ", ".join(each.peer.label for each in destinations if each.sending.status is not SendingStatus.FINISHED)

    def belongs_to(self, owner: object) -> bool:
        """Whether it is of no other sender of SGLang's than this one."""
        return self.owner is None or self.owner() in (None, owner)

    def left(self, incarnation: str, epoch: int) -> None:
        """A decode rank is done with the request."""
        for each in self.destinations.values():
            if (each.peer.incarnation, each.epoch) == (incarnation, epoch):
                each.left = True

    @property
    def closed(self) -> bool:
        """Whether the scheduler has handed the last chunk over."""
        return bool(self.chunks) and self.chunks[-1].last and self.chunks[-1].handed_over

    @property
    def tokens(self) -> int:
        """Of the prompt, as far as it has been computed or is being."""
        return sum(chunk.tokens for chunk in self.chunks)

    def begin(self, end: int, page_size: int, placed: Placed, *, last: bool) -> Chunk | None:
        """The model computes the prompt up to token `end` now: the chunk that SGLang will hand over, if it will.

        As its send_kv_chunk cuts them: from where the last chunk ended, to the last full page unless it is the last.
        None: no page is completed, or there is nothing left to compute.
        """
        if self.chunks and self.chunks[-1].last:
            return None
        first_page = self.chunks[-1].end_page if self.chunks else 0
        pages = covered(end, page_size, last=last) - first_page
        if pages < 0 or (not pages and not last):
            return None
        tokens = (end if last else (first_page + pages) * page_size) - first_page * page_size
        chunk = Chunk(first_page, pages, tokens, last, handed_over=False, placed=placed, leaves=self.leaves)
        self.chunks.append(chunk)
        return chunk

    def reach(self, chunk: Chunk, mark: Mark) -> bool:
        """The model has come to `mark` with a chunk that was begun; False if it is no chunk of this request.

        Its place must be ready.
        """
        if not any(chunk is each for each in self.chunks):
            return False
        if chunk.placed is not None:
            if not chunk.handed_over and chunk.leaves == self.leaves:
                self._place(chunk, chunk.placed.ids.array(), chunk.placed.slot)
            chunk.placed = None
        chunk.reached = max(chunk.reached, mark)
        return True

    def _place(self, chunk: Chunk, ids: Ids, slot: HostCopy | None) -> None:
        if len(ids) != chunk.end_page:
            raise ProtocolError(f"{chunk}: {len(ids)} pages of the request are known")
        self.pages = ids
        if slot is not None:
            (self.slot,) = slot.array().tolist()

    def move(self) -> Move | None:
        """SGLang may put the request into other pages and another slot now, and give the present ones away.

        It does when a prefix cache takes the prompt over and has some of it already, also pages of chunks that were
        handed over long ago. What has been sent is right; what is being read must be read again, and the rest waits
        until `locate` says where the request is. None: nothing of it is known yet, so that nothing is to be said.
        """
        if not self.chunks:
            return None
        self.leaves += 1
        self.moves += 1
        self.moving = True
        return Move(self.leaves, self.chunks[-1].end_page)

    def locate(self, move: Move, placed: Placed) -> bool:
        """Where the request is after a move; False if it has moved again. placed: ready, of all pages up to the move's.

        Raises ProtocolError if there are not as many.
        """
        if move.leaves != self.leaves:
            return False
        ids = placed.ids.array()
        if len(ids) != move.pages:
            raise ProtocolError(f"SGLang has moved {move.pages} pages, and {len(ids)} are known; {REPORT}")
        # A chunk that was begun since is behind these.
        self.pages = np.concatenate([ids, self.pages[move.pages :]])
        if placed.slot is not None and any(chunk.last for chunk in self.chunks):
            (self.slot,) = placed.slot.array().tolist()
        self.moving = False
        return True

    def hand_over(self, chunk: Chunk, ids: Ids, slot: int) -> None:
        """SGLang's scheduler says what it has computed, and where it lies now. ids: of the chunk's pages. slot: with
        the last chunk, or -1.

        Raises ProtocolError if the model was seen to compute something else: then something else has been sent.
        """
        begun = next((each for each in self.chunks if not each.handed_over), None)
        if begun is None:
            self.chunks.append(chunk)
        elif begun.shape == chunk.shape:
            begun.ready, begun.handed_over = chunk.ready, True
            known, known_slot = self.pages[chunk.first_page : chunk.end_page], self.slot if chunk.last else slot
            if not np.array_equal(known, ids) or known_slot != slot:
                self.moves += 1  # read under way would be of where it was
        else:
            raise ProtocolError(f"SGLang hands over {chunk}, but has computed {begun}; {REPORT}")
        # A later chunk that has been begun keeps its pages.
        self.pages = np.concatenate([self.pages[: chunk.first_page], ids, self.pages[chunk.end_page :]])
        self.slot = slot if chunk.last else self.slot

    def extend(self, destination: Destination) -> None:
        """Bring a destination's sequence up to what the source's caches hold."""
        while destination.chunks < len(self.chunks):
            chunk = self.chunks[destination.chunks]
            reached = chunk.look()
            pieces, destination.entries = destination.program.part(
                *chunk.shape[:3], last=chunk.last, start=destination.entries, upto=reached
            )
            if pieces:
                destination.sequence.extend(pieces)
                skipped = [index for index, piece in enumerate(pieces) if not destination.side.parts(piece)]
                destination.sending.produced(len(pieces), skipped)
            if reached != COMPLETE:
                return
            destination.chunks += 1
            destination.entries = 0
        if self.closed and destination.sending.total is None:
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
