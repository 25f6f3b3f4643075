"""Destination side, one request: what has arrived for it, what is merged, what it still waits for. Books only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_hetero.device import Done, at_once
from sglang_hetero.errors import ProtocolError
from sglang_hetero.perf.records import ReceivedRecord

from . import messages
from .lifetime import Receiving, ReceivingStatus, Repetition, Stillness
from .outbox import Ids
from .pieces import Coverage, Piece, StageProgram, StateMode
from .sources import SourceSet
from .staging import STAGING_OPTION, Arena


@dataclass(frozen=True)
class Arrived:
    """A piece all of whose sharers have written: ready to be merged."""

    stage: int
    seq: int
    """Its number in the stage's sequence, or among the stage's reads if `pulled`."""
    piece: Piece
    pulled: bool = False

    @property
    def unit(self) -> int:
        """Number of its unit, modulo the window."""
        return self.seq


@dataclass
class Inbox:
    """One request at a decode rank."""

    room: int
    epoch: int
    source_set: SourceSet
    mode: StateMode
    programs: tuple[StageProgram, ...]
    machine: Receiving[Piece]
    coverage: Coverage
    pages: Ids
    """Ids of its pages in this rank's pool."""
    slot: int
    perf: ReceivedRecord
    """What the request takes, for the log, the metrics and the trace."""
    opened: float
    """When it was opened, on the clock of the side."""
    progress: float
    """When something last happened, on the same clock."""
    use: str = ""
    """Names this use of the room: the same at all ranks of this decode server, and never the same again."""
    ended: float = 0.0
    """When it ended, on the clock of the side."""
    repetition: Repetition = field(default_factory=Repetition)
    stillness: Stillness = field(default_factory=Stillness)
    heard: set[int] = field(default_factory=set)
    """Numbers of the sources that have said anything about it: they know this rank."""
    repeated: bool = False
    """Whether sources were told again where it goes: one that could not be told the first time may know it."""
    units: tuple[tuple[int, ...], ...] = ()
    """Per stage the offsets of its window in the arena."""
    state_ready: deque[Arrived] = field(default_factory=deque)
    """Linear state that the scheduler thread will merge."""
    state_enqueued: list[tuple[Done, Arrived]] = field(default_factory=list)
    """Linear state whose merge has been enqueued on the device and may not be complete."""
    emptied: Done = at_once
    """Whether what nobody sends has been emptied: enqueued on the device, before any forward pass of the request."""
    first: messages.FirstGeneration | None = None
    running: int = 0
    """Merges that a worker has begun and not ended: pages must not be freed before it is 0."""
    reading: int = 0
    """Reads from a source (mode pull) that have not returned: they write into the request's units."""
    reading_since: float = 0.0
    """When the reads that are under way began, time.monotonic()."""
    to_read: deque[Arrived] = field(default_factory=deque)
    """What is still to be read, in mode pull."""
    batch: list[Arrived] = field(default_factory=list)
    """What is being read now, in mode pull."""
    in_doubt: set[int] = field(default_factory=set)
    """Sources of which a read has failed and may still bring bytes."""
    unmerged: int = 0
    """Pieces of `batch` that have been read and not been merged."""
    digests: dict[tuple[int, int, bool], dict[int, bytes]] = field(default_factory=dict)
    """In verification mode, per stage and seq, and whether decode reads it, what the sharers say that they have."""
    places: dict[int, str] = field(default_factory=dict)
    """In mode pull, digests of where each source says that it keeps the request."""

    def elsewhere(self) -> str:
        """Which source keeps the request elsewhere than the first token's message says, or an empty text."""
        assert self.first is not None
        told = messages.place_of(self.first.page_ids, self.first.slot)
        for number, place in sorted(self.places.items()):
            if place != told:
                label = self.source_set.sources[number].label
                return (
                    f"{label} keeps the request in other pages or another slot than the rank that told the first token"
                )
        return ""

    def totals(self, message: messages.FirstGeneration) -> dict[int, int]:
        """Pieces per stage that prefill must have sent, from what its scheduler says of the chunks.

        Raises ProtocolError if it speaks of another prefill server or another prompt.
        """
        if message.topology != self.source_set.topology:
            raise ProtocolError(
                f"it is of topology {message.topology}, bound was {self.source_set.topology}; a rank was started again"
            )
        wanted = -(-message.tokens // self.programs[0].page_size)
        if wanted != len(self.pages) or len(message.page_ids) != wanted:
            raise ProtocolError(
                f"a prompt of {message.tokens} tokens has {wanted} pages; {len(message.page_ids)} at prefill, "
                f"{len(self.pages)} here"
            )
        return {stage: program.total(message.chunks, message.tokens) for stage, program in enumerate(self.programs)}

    def waits_for(self) -> str:
        """What has not come yet, and from whom; an empty text if nothing is missing."""
        missing = self.coverage.missing() or ("" if self.first is not None else "the first token")
        return f"{missing} from {', '.join(source.label for source in self.source_set.sources)}" if missing else ""

    def overdue(
        self, now: float, window_seconds: float, stall_seconds: float, units: Arena, doubts: Callable[[], str]
    ) -> str:
        """Why the request has waited too long, or an empty text: for units, or for anything to happen.

        doubts: tells which units are quarantined, from whom and since when; empty if none are. Asked only when the
        text needs it, since every poll of every request comes here.
        """
        status, idle = self.machine.status, now - self.progress
        if status is ReceivingStatus.QUEUED and now - self.opened > window_seconds:
            said = doubts()
            return (
                f"no units of staging for {now - self.opened:.0f} s: {units.held} of {units.units} are in use, "
                f"{units.quarantined} wait for a writer{f' ({said})' if said else ''}; raise {STAGING_OPTION}"
                f"{', or start the servers again that may still write' if said else ''}"
            )
        if status is ReceivingStatus.OPEN and self.stillness.too_long(now, idle, stall_seconds):
            sources = ", ".join(source.label for source in self.source_set.sources)
            lacking = self.coverage.missing() or "the first token"
            return f"nothing has arrived for {idle:.0f} s from {sources}: {lacking} is missing"
        return ""
