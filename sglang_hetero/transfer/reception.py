"""What happens at a decode rank when its state machines say so: merge, acknowledge, grant units, finish, give up.

One lock guards the books; it is never held while bytes move or a message is posted: what is to be posted is collected
(`Outgoing`) and goes out when the lock is free.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import torch

from sglang_hetero.device import ForwardLane, Lane
from sglang_hetero.errors import HeteroError, ProtocolError
from sglang_hetero.layout.manifest import Manifest, Side
from sglang_hetero.layout.wire import encode as encode_manifest
from sglang_hetero.merge.assemble import Memory
from sglang_hetero.perf.records import Perf, silent

from . import lifetime, messages
from .counters import Counters
from .engine.base import Engine
from .faults import Faults
from .heard import Heard
from .inbox import Arrived, Inbox
from .lifetime import ReceivingStatus
from .link import Endpoint, Post
from .merger import MergeWorker, differences, measured, merge
from .pieces import Piece, StateMode
from .puller import Outcome, Puller, next_batch, pieces_to_read, reads_of
from .sources import Addressees
from .staging import Arena, per_stage

logger = logging.getLogger(__name__)

MAX_READERS = 16
"""Sources that are read from at the same time."""
MAX_OVER = 1 << 14
"""Requests of which it is remembered how they ended, and rooms of which it is how often they were used: far more than a
prefill server has under way."""
LOOK_SECONDS = 0.5
"""Between looks whether something is to be said again; a fraction of the shortest silence after which it is."""
EPOCH_BITS = 48
"""Of the random number that a process counts its epochs from: two processes' ranges do not meet, and 2**48 and all
requests of a process fit what a message can carry."""


class Progress(Enum):
    """Where a request is, as the scheduler sees it."""

    WAITING = auto()
    """For units of staging."""
    ARRIVING = auto()
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Settings:
    """What the user chose. window: units per stage. Times in seconds: of waiting for units, of standing still."""

    unit_bytes: int
    window: int
    mode: StateMode
    parallel_pull: bool
    verify: bool
    window_seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class Identity:
    """Who this rank is to its peers: control socket, identity at the control service, and its server."""

    endpoint: Endpoint
    control: bytes
    server: str = ""
    """The same at all ranks of this decode server, and at no other server's."""


@dataclass(frozen=True)
class Writer:
    """A source that may still write into units of a failed request, and the session of its transfer engine."""

    label: str
    incarnation: str
    session: str


@dataclass(frozen=True)
class Doubt:
    """A failed request whose units are quarantined. units: how many; seconds: since it failed.

    writers: who may still write; none: a merge or a read of this rank has not ended.
    """

    room: int
    epoch: int
    units: int
    seconds: float
    writers: tuple[Writer, ...]

    def __str__(self) -> str:
        who = ", ".join(writer.label for writer in self.writers) or "a merge or a read of this rank"
        return f"{self.units} units of room {self.room} for {self.seconds:.0f} s, for {who}"


Outgoing = list[tuple[Inbox, int, messages.Message]]
"""Messages to sources, by number, to be posted when the lock is free."""


class Reception:
    """The requests that one decode rank receives: books and workers. `DecodeSide` is what others call."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        engine: Engine,
        memory: Memory,
        arena: torch.Tensor,
        settings: Settings,
        forward: ForwardLane,
        post: Post,
        identity: Identity,
        counters: Counters | None = None,
        perf: Perf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """arena: staging memory, uint8, one-dimensional, registered with the engine."""
        self.manifest = manifest
        self.perf = perf or silent(Side.DECODE, manifest.label)
        self.counters = counters or Counters()
        self._faults = Faults(manifest.label, logger)
        self.settings = settings
        self._memory, self._arena, self._forward = memory, arena, forward
        self._session = engine.session
        self._post, self._identity, self._clock = post, identity, clock
        self._units = Arena(arena.numel(), settings.unit_bytes)
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._inboxes: dict[tuple[int, int], Inbox] = {}  # by room and epoch, until their units are home
        self._current: dict[int, Inbox] = {}
        # A number that no message for a former process at this endpoint carries: it could still come.
        self._epoch = secrets.randbits(EPOCH_BITS)
        self._uses: OrderedDict[int, int] = OrderedDict()  # how often each room was opened here
        # How requests ended here, by room and epoch, those that ended last.
        self._over: OrderedDict[tuple[int, int], tuple[Addressees, str | None]] = OrderedDict()
        self._heard = Heard()
        self._next_look = 0.0
        self._lane = Lane(arena.device)
        self._worker = MergeWorker(manifest.label, self._merge_batch, self._turn_failed, arena.device)
        readers = MAX_READERS if settings.parallel_pull else 1
        self._puller = Puller(engine, ThreadPoolExecutor(readers, thread_name_prefix="hetero-reader"), arena.device)

    # Actions of the machines; the lock is held.

    def _carry_out(self, inbox: Inbox, actions: Sequence[lifetime.Action[Piece]]) -> Outgoing:
        outgoing: Outgoing = []
        for action in actions:
            match action:
                case lifetime.Merge(stage, seq, piece):
                    self._dispatch(inbox, Arrived(stage, seq, piece))
                case lifetime.Ack(stage, upto):
                    sources = inbox.source_set.stages[stage].sources
                    outgoing += self._to(inbox, sources, messages.Ack, stage=stage, upto=upto)
                case lifetime.Pull():
                    outgoing += self._read_all(inbox)
                case lifetime.Settle(reason):
                    outgoing += self._settle(inbox, reason)
                case lifetime.ReturnUnits():
                    outgoing += self._return_units(inbox)
        return outgoing

    def _dispatch(self, inbox: Inbox, arrived: Arrived) -> None:
        """Linear state is for the scheduler's thread: no forward pass may run between. The worker does the rest."""
        if arrived.piece.role is None:
            inbox.state_ready.append(arrived)
        else:
            self._worker.put(inbox, arrived)

    def _fail(self, inbox: Inbox, reason: str) -> Outgoing:
        return self._carry_out(inbox, inbox.machine.fail(reason))

    def _fail_here(self, inbox: Inbox, problem: str) -> Outgoing:
        """Of a problem of this rank's; nothing happens if it is an empty text."""
        return self._fail(inbox, messages.attributed(self.manifest.label, problem)) if problem else []

    def _settle(self, inbox: Inbox, reason: str | None) -> Outgoing:
        """Every end of a request here comes through this, once. reason: why it failed, None if it did not."""
        inbox.progress = inbox.ended = self._clock()
        self._remember(inbox, reason)
        if reason is None:
            self.counters.add("requests")
            return self._to(inbox, self._all(inbox), messages.Finish)
        logger.warning("%s: room %d failed: %s", self.manifest.label, inbox.room, reason)
        self.counters.add("failures")
        # Also to sources that know nothing of it: prefill may be waiting for a Bind.
        outgoing = self._abort(inbox, self._all(inbox))
        if inbox.units:
            self._units.quarantine((inbox.room, inbox.epoch), {inbox.source_set.address})
        else:
            self._units.cancel((inbox.room, inbox.epoch))
        # It merges nothing more: what was not begun is over.
        waiting, inbox.state_ready = list(inbox.state_ready), deque()
        for arrived in waiting:
            outgoing += self._ended(inbox, arrived)
        return outgoing

    def _remember(self, inbox: Inbox, reason: str | None) -> None:
        """How a request has ended, for sources to which that got lost."""
        self._over[inbox.room, inbox.epoch] = (inbox.source_set.addressees, reason)
        while len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def _lacking(self, inbox: Inbox) -> str:
        """What is missing although all that was told has arrived; the machine asks before it completes.

        It counts messages; what the destination has is known here, and this is what counts.
        """
        missing, first = inbox.coverage.missing(), inbox.first
        if missing:
            return f"{self.manifest.label}: all pieces have arrived, but nothing brought {missing}"
        if first is not None and inbox.coverage.tokens not in (None, first.tokens):
            have = f"pages of {inbox.coverage.tokens} tokens have arrived"
            return f"{self.manifest.label}: {have}, prefill at {inbox.source_set.address} says {first.tokens}"
        return ""

    def _return_units(self, inbox: Inbox) -> Outgoing:
        owner = (inbox.room, inbox.epoch)
        if inbox.machine.status is ReceivingStatus.FAILED:
            self._units.drained(owner, inbox.source_set.address)
        else:
            self._units.release(owner)
        self._inboxes.pop(owner, None)
        return self._grant()

    # What may have been lost is said again; the lock is held.

    def _remind(self) -> Outgoing:
        """Say again what was said last, of every request about which nothing new has been heard for a while."""
        now = self._clock()
        if now < self._next_look:
            return []
        self._next_look = now + LOOK_SECONDS
        outgoing: Outgoing = []
        forgotten: set[tuple[int, int]] = set()  # once per look: a registration is large
        for inbox in self._inboxes.values():
            status = inbox.machine.status
            if status is ReceivingStatus.QUEUED or not inbox.repetition.due(now, inbox.progress):
                continue  # nobody has been told anything
            if status is ReceivingStatus.OPEN:
                outgoing += self._say_again(inbox, forgotten)
            elif status is ReceivingStatus.FAILED:
                outgoing += self._abort(inbox, sorted(inbox.machine.may_write))
        if outgoing:
            self.counters.add("repeated", len(outgoing))
        return outgoing

    def _say_again(self, inbox: Inbox, forgotten: set[tuple[int, int]]) -> Outgoing:
        """Where an open request goes, and how far it is. A source that has given it up answers that it has.

        forgotten: sources (identity of their set, number) that are registered with again in this look, since they may
        not know us any more. What they have said about other requests does not tell: those may be long over.
        """
        known = inbox.source_set
        for number in self._all(inbox):
            if number not in inbox.heard and (id(known), number) not in forgotten:
                forgotten.add((id(known), number))
                known.registered.discard(number)
        inbox.repeated = True
        outgoing = self._invite(inbox)
        for stage, upto in enumerate(inbox.machine.acknowledged):
            if upto:
                outgoing += self._to(inbox, known.stages[stage].sources, messages.Ack, stage=stage, upto=upto)
        return outgoing

    def _answer_late(self, message: messages.Ready) -> None:
        """A source still sends a request that has ended here: our word about that was lost. The lock is free."""
        with self._lock:
            known, reason = self._over.get((message.room, message.epoch), (None, None))
            if known is None or not known.is_source(message.incarnation, message.source):
                return
            self._heard.note(message.incarnation, self._clock())
        fields: dict[str, Any] = {
            "room": message.room,
            "epoch": message.epoch,
            "incarnation": self.manifest.incarnation,
        }
        answer: messages.Message = messages.Finish(**fields)
        if reason is not None:
            answer = messages.Abort(source=message.incarnation, reason=reason, **fields)
        self.counters.add("repeated")
        try:
            self._post(known.endpoints[message.source], messages.encode(answer))
        except Exception as error:
            name, where = type(answer).__name__, known.endpoints[message.source]
            logger.warning("%s: no %s to prefill at %s: %s", self.manifest.label, name, where, error)

    # Units.

    def _grant(self) -> Outgoing:
        """Tell the sources of every request that has just been given its units."""
        outgoing: Outgoing = []
        for owner, offsets in self._units.grants():
            inbox = self._inboxes[owner]  # type: ignore[index]  # owners are (room, epoch)
            inbox.units = per_stage(offsets, len(inbox.source_set.stages))
            inbox.progress = self._clock()
            inbox.perf.granted()
            self._carry_out(inbox, inbox.machine.bound())
            outgoing += self._invite(inbox)
        return outgoing

    def _invite(self, inbox: Inbox) -> Outgoing:
        """Tell every source where the request goes, and before that once who we are."""
        known, place = inbox.source_set, self.manifest.coordinates
        outgoing: Outgoing = []
        for number in self._all(inbox):
            if number not in known.registered:
                known.registered.add(number)
                source = known.addressees.incarnations[number]
                outgoing += self._to(inbox, (number,), messages.Register, source=source, **self._registration())
            fields = known.bind_fields(number, inbox.units)
            outgoing += self._to(
                inbox,
                (number,),
                messages.Bind,
                use=inbox.use,
                rank=place.tp_rank,
                ranks=place.tp_size,
                pages=len(inbox.pages),
                mode=inbox.mode,
                verify=self.settings.verify,
                **fields,
            )
        return outgoing

    def _abort(self, inbox: Inbox, sources: Sequence[int]) -> Outgoing:
        """Tell these sources that the request has failed here, and why."""
        outgoing: Outgoing = []
        for number in sources:
            outgoing += self._to(
                inbox,
                (number,),
                messages.Abort,
                source=inbox.source_set.addressees.incarnations[number],
                use=inbox.use,
                reason=inbox.machine.reason or "",
            )
        return outgoing

    def _registration(self) -> dict[str, Any]:
        return {
            "manifest": encode_manifest(self.manifest),
            "session": self._session,
            "host": self._identity.endpoint.host,
            "port": self._identity.endpoint.port,
            "arena": self._arena.data_ptr(),
            "arena_bytes": self._arena.numel(),
            "control": self._identity.control,
        }

    def _all(self, inbox: Inbox) -> Sequence[int]:
        return range(len(inbox.source_set.sources))

    def _to(
        self, inbox: Inbox, sources: Sequence[int], kind: Callable[..., messages.Message], **fields: Any
    ) -> Outgoing:
        message = kind(room=inbox.room, epoch=inbox.epoch, incarnation=self.manifest.incarnation, **fields)
        return [(inbox, number, message) for number in sources]

    def _send_again(self, outgoing: Outgoing) -> None:
        """Post what has been said before; the lock must be free. What cannot be posted is said again later.

        A source that cannot be reached now may have heard it the first time, and be writing.
        """
        for inbox, number, message in outgoing:
            known = inbox.source_set
            try:
                self._post(known.endpoints[number], messages.encode(message))
            except Exception as error:
                label = known.sources[number].label
                logger.info("%s: no %s to %s: %s", self.manifest.label, type(message).__name__, label, error)

    def _send(self, outgoing: Outgoing) -> None:
        """Post; the lock must be free. A source that cannot be reached fails the request."""
        later = outgoing
        while later:
            now, later = later, []
            unknown: set[tuple[int, int]] = set()  # sources that do not know us: what follows would lie there for ever
            for inbox, number, message in now:
                label = inbox.source_set.sources[number].label
                try:
                    if isinstance(message, messages.Bind) and (id(inbox.source_set), number) in unknown:
                        raise ProtocolError("it does not know this rank")
                    self._post(inbox.source_set.endpoints[number], messages.encode(message))
                except Exception as error:
                    logger.warning("%s: no %s to %s: %s", self.manifest.label, type(message).__name__, label, error)
                    reason = f"{label} cannot be reached: {error}"
                    with self._lock:
                        if isinstance(message, messages.Register):
                            inbox.source_set.registered.discard(number)
                            unknown.add((id(inbox.source_set), number))
                        later += self._fail(inbox, reason)
                        # It will never know where to write, unless another thread has told it meanwhile.
                        if isinstance(message, messages.Bind) and not inbox.repeated:
                            later += self._carry_out(inbox, inbox.machine.drained(number))

    # Merging.

    def _turn_failed(self, inbox: Inbox, problem: str) -> None:
        """On the worker's thread: nobody knows how far the end of a merge has come."""
        with self._lock:
            outgoing = self._fail_here(inbox, problem)
        self._send(outgoing)

    def _merge_batch(self, inbox: Inbox, batch: Sequence[Arrived]) -> None:
        """On the worker's thread."""
        with self._lock:
            alive = self._is_open(inbox)
            inbox.running += alive
        problem = ""
        if alive:
            try:
                began = time.monotonic()
                with self._lane.active():
                    merge(self._arena, inbox.source_set.assembler, inbox, batch)
                measured(inbox, batch, time.monotonic() - began)
                problem = self._verified(inbox, batch)
            except BaseException as error:  # whatever it is: SGLang and the units wait for the end of this merge
                logger.exception("room %d: merge failed", inbox.room)
                problem = f"merge failed: {type(error).__name__}: {error}"
        with self._quiet:
            inbox.running -= alive
            self._quiet.notify_all()
            outgoing = self._merged(inbox, batch, problem)
        self._send(outgoing)

    def _merge_state(self, inbox: Inbox, batch: Sequence[Arrived]) -> None:
        """On the scheduler's thread: enqueue; `_finish_state` sees to the rest."""
        problem = ""
        try:
            with self._forward.active():
                began = time.monotonic()
                merge(self._arena, inbox.source_set.assembler, inbox, batch)
                measured(inbox, batch, time.monotonic() - began)
                problem = self._verified(inbox, batch)
        except Exception as error:
            logger.exception("room %d: merge of linear state failed", inbox.room)
            problem = f"merge of linear state failed: {type(error).__name__}: {error}"
        done = self._forward.done()  # also of what was enqueued before an error
        with self._lock:
            inbox.state_enqueued.extend((done, arrived) for arrived in batch)
            outgoing = self._fail_here(inbox, problem)
        self._send(outgoing)

    def _finish_state(self, inbox: Inbox) -> Outgoing:
        """Count the linear state whose merge is complete on the device; the lock is held."""
        complete = [arrived for done, arrived in inbox.state_enqueued if done()]
        if not complete:
            return []
        inbox.state_enqueued = [entry for entry in inbox.state_enqueued if entry[1] not in complete]
        return self._merged(inbox, complete, "")

    def _merged(self, inbox: Inbox, batch: Sequence[Arrived], problem: str) -> Outgoing:
        """A batch has been merged, or dropped; the lock is held. Of a stage's acknowledgements only the last goes."""
        outgoing = self._fail_here(inbox, problem)
        inbox.progress = self._clock()
        for arrived in batch:
            try:
                if self._is_open(inbox):
                    inbox.coverage.add(arrived.piece)
                    self.counters.add("pieces")
            except Exception as error:
                outgoing += self._fail_here(inbox, _told(inbox, "counting a piece", error))
            try:
                outgoing += self._ended(inbox, arrived)
            except Exception as error:
                outgoing += self._fail_here(inbox, _told(inbox, "the end of a merge", error))
        newest = {
            (id(to), number, message.stage): message
            for to, number, message in outgoing
            if isinstance(message, messages.Ack)
        }
        return [
            (to, number, message)
            for to, number, message in outgoing
            if not isinstance(message, messages.Ack) or newest[id(to), number, message.stage] is message
        ]

    def _ended(self, inbox: Inbox, arrived: Arrived) -> Outgoing:
        """A merge is over, however it ended; the lock is held."""
        if not arrived.pulled:
            return self._carry_out(inbox, inbox.machine.merged(arrived.stage, arrived.seq))
        inbox.unmerged -= 1
        return [] if inbox.unmerged else self._read_on(inbox)

    def _is_open(self, inbox: Inbox) -> bool:
        return inbox.machine.status is ReceivingStatus.OPEN

    def _verified(self, inbox: Inbox, batch: Sequence[Arrived]) -> str:
        """In verification mode what differs between a source's bytes and ours, or an empty text."""
        if not self.settings.verify:
            return ""
        for arrived in batch:
            with self._lock:
                said = inbox.digests.pop((arrived.stage, arrived.seq, arrived.pulled), {})
            self.counters.add("verified")
            difference = differences(self._memory, inbox, arrived, said)
            if difference:
                self.counters.add("differences")
                return difference
        return ""

    # Mode pull; the lock is held but in `_read_done`.

    def _read_all(self, inbox: Inbox) -> Outgoing:
        """Begin to read all that was not pushed."""
        try:
            inbox.to_read = pieces_to_read(inbox)
            problem = inbox.elsewhere()
        except Exception as error:
            problem = _told(inbox, "what is to be read", error)
        outgoing = self._fail_here(inbox, problem)
        return outgoing + self._read_on(inbox)

    def _read_on(self, inbox: Inbox) -> Outgoing:
        """Read the next pieces, or report that all has been read, or that a failed request reads no more.

        Not as long as a read is in doubt: what it brings would land in units that are somebody else's.
        """
        if inbox.in_doubt:
            return []
        try:
            inbox.batch = next_batch(inbox.to_read, inbox.units) if self._is_open(inbox) else []
            problem = self._read_batch(inbox) if inbox.batch else ""
        except Exception as error:
            problem = _told(inbox, "what is to be read next", error)
        outgoing = self._fail_here(inbox, problem)
        if not inbox.reading:  # else the last of those that were begun comes here again
            outgoing += self._carry_out(inbox, inbox.machine.pulled())
        return outgoing

    def _read_batch(self, inbox: Inbox) -> str:
        """Begin to read the batch. Returns why that is not possible, or an empty text."""
        assert inbox.first is not None
        pages = inbox.first.page_ids.astype(np.int64)
        reads = reads_of(inbox, inbox.batch, self._arena.data_ptr(), pages, inbox.first.slot)
        inbox.reading_since = time.monotonic()
        inbox.reading, problem = self._puller.start(inbox, reads, self._read_done)
        self.counters.add("reads", inbox.reading)
        return problem

    def _read_done(self, inbox: Inbox, source: int, outcome: Outcome) -> None:
        """On a reader's thread: a source has been read from. When all have, the pieces are merged."""
        problem = outcome.problem
        with self._lock:
            inbox.progress = self._clock()
            if outcome.in_doubt:
                inbox.in_doubt.add(source)
            outgoing = self._fail_here(inbox, problem)
            inbox.reading -= 1
            if not inbox.reading:
                inbox.perf.read(time.monotonic() - inbox.reading_since)
                inbox.unmerged = len(inbox.batch)
                if self._is_open(inbox):
                    for arrived in inbox.batch:
                        self._dispatch(inbox, arrived)
                else:
                    inbox.unmerged = 0
                    outgoing += self._read_on(inbox)
        self._send(outgoing)

    def _source_gone(self, inbox: Inbox, number: int) -> Outgoing:
        """Nothing of a source can reach our memory any more; the lock is held."""
        outgoing = self._carry_out(inbox, inbox.machine.gone(number))
        if number in inbox.in_doubt:
            inbox.in_doubt.discard(number)
            if not inbox.reading and not inbox.unmerged:
                outgoing += self._read_on(inbox)
        return outgoing


def _told(inbox: Inbox, what: str, error: Exception) -> str:
    """A reason to fail a request with. what: the step that raised, for what only a fault of ours can raise."""
    if isinstance(error, HeteroError):
        return str(error)
    logger.error("room %d: %s failed", inbox.room, what, exc_info=error)
    return f"{what} failed: {type(error).__name__}: {error}"
