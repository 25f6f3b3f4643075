"""One decode rank's side of the transfer: who it asks, what arrives, what is merged, and when a request is complete.

Three kinds of threads come here: those that receive messages (`handle`), SGLang's scheduler (`open`, `poll`, `fail`,
`settle`), and workers that merge attention KV and, in mode pull, read. One lock guards the books; it is never held
while bytes move or a message is posted: what is to be posted is collected and goes out when the lock is free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import torch

from sglang_hetero.errors import HeteroError, ProtocolError
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.layout.wire import encode as encode_manifest
from sglang_hetero.merge.assemble import Memory

from . import lifetime, messages, verify
from .counters import Counters
from .device import ForwardLane, Lane
from .engine.base import Engine
from .inbox import Arrived, Inbox
from .lifetime import Receiving, ReceivingStatus
from .link import Endpoint, Post
from .merger import MergeWorker, merge
from .outbox import Ids
from .pieces import Coverage, Piece, StateMode
from .puller import Puller, next_batch, pieces_to_read, reads_of
from .sources import SourceSet, source_set
from .staging import Arena, per_stage

logger = logging.getLogger(__name__)

FENCE_WARNING_SECONDS = 5.0
"""A merge takes milliseconds; a fence that waits longer says so each time this has passed."""
FENCE_POLL_SECONDS = 0.001
"""Between looks at a device that copies a failed request's state."""
MAX_READERS = 16
"""Sources that are read from at the same time."""


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
    """Who this rank is to its peers: control socket, identity at the control service, place among decode's ranks."""

    endpoint: Endpoint
    control: bytes


Outgoing = list[tuple[Inbox, int, messages.Message]]
"""Messages to sources, by number, to be posted when the lock is free."""


class DecodeSide:
    """The transfer at one decode rank."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """arena: staging memory, uint8, one-dimensional, registered with the engine."""
        self.manifest = manifest
        self.counters = Counters()
        self.settings = settings
        self._memory, self._arena, self._forward = memory, arena, forward
        self._session = engine.session
        self._post, self._identity, self._clock = post, identity, clock
        self._units = Arena(arena.numel(), settings.unit_bytes)
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._inboxes: dict[tuple[int, int], Inbox] = {}  # by room and epoch, until their units are home
        self._current: dict[int, Inbox] = {}
        self._epoch = 0
        self._lane = Lane(arena.device)
        self._worker = MergeWorker(manifest.label, self._merge_batch)
        readers = MAX_READERS if settings.parallel_pull else 1
        self._puller = Puller(engine, ThreadPoolExecutor(readers, thread_name_prefix="hetero-reader"))

    @property
    def control_identity(self) -> bytes:
        """Under which the control services of prefill servers know this rank."""
        return self._identity.control

    def join(self, address: str, topology: messages.Topology) -> SourceSet:
        """What this rank would take from a prefill replica. Raises HeteroError if the two do not go together."""
        return source_set(
            address,
            topology,
            self.manifest,
            self._memory,
            unit_bytes=self.settings.unit_bytes,
            units=self.settings.window,
        )

    # SGLang's scheduler.

    def open(self, room: int, source_set: SourceSet, pages: Ids, slot: int) -> None:
        """A request has its pages (ids in this rank's pool, in order) and slot (-1 without linear state).

        Its window is taken when there are units, first come, first served; then the sources are told. Raises
        HeteroError for what can never work.
        """
        ids = np.array(pages, dtype=np.int64)
        mode = self.settings.mode
        now = self._clock()
        device = self._arena.device
        with self._lock:
            self._epoch += 1
            inbox = Inbox(
                room,
                self._epoch,
                source_set,
                mode,
                source_set.programs_of(mode),
                Receiving(source_set.stages, pulls=any(each.pulls for each in source_set.programs_of(mode))),
                Coverage(source_set.plan, len(ids)),
                ids,
                torch.from_numpy(ids).to(device),
                slot,
                torch.tensor([slot], device=device) if slot >= 0 else None,
                opened=now,
                progress=now,
            )
            self._units.request((room, inbox.epoch), self.settings.window * len(source_set.stages))
            self._inboxes[room, inbox.epoch] = self._current[room] = inbox
            outgoing = self._grant()
        self._send(outgoing)

    def poll(self, room: int) -> Progress:
        """Where the request is. Merges what has arrived of its linear state: call it between forward passes."""
        with self._lock:
            inbox = self._current[room]
            state = list(inbox.state_ready) if inbox.machine.status is ReceivingStatus.OPEN else []
            if state:
                inbox.state_ready.clear()
        if state:
            self._merge_state(inbox, state)
        with self._lock:
            outgoing = self._finish_state(inbox)
        self._send(outgoing)
        self._check_time(inbox)
        with self._lock:
            status = inbox.machine.status
            if status is ReceivingStatus.FAILED or inbox.fault:
                return Progress.FAILED
            if status is ReceivingStatus.COMPLETE:
                return Progress.COMPLETE
            return Progress.WAITING if status is ReceivingStatus.QUEUED else Progress.ARRIVING

    def first(self, room: int) -> messages.FirstGeneration:
        """The first token and what belongs to it, of a request that is complete."""
        first = self._current[room].first
        assert first is not None
        return first

    def reason(self, room: int) -> str:
        """Why a request has failed."""
        inbox = self._current[room]
        return inbox.fault or inbox.machine.reason or ""

    def fail(self, room: int, reason: str) -> None:
        """Give a request up; no effect on one that has ended."""
        with self._lock:
            inbox = self._current.get(room)
            outgoing = self._fail(inbox, reason) if inbox is not None else []
        self._send(outgoing)

    def settle(self, room: int) -> None:
        """SGLang lets go of the request: after this call nothing of ours touches its pages and slot any more."""
        self.fail(room, "the request ended on the decode side")
        with self._quiet:
            inbox = self._current.pop(room, None)
            if inbox is None:
                return
            # Linear state that the device is still copying lies in units that would be given away.
            while any(not done() for done, _ in inbox.state_enqueued):
                self._quiet.wait(FENCE_POLL_SECONDS)
            outgoing = self._finish_state(inbox)
            while inbox.running:
                if not self._quiet.wait(FENCE_WARNING_SECONDS):
                    logger.warning("room %d: waiting for a merge to end before its pages are freed", room)
        self._send(outgoing)

    def holds(self, room: int) -> bool:
        """Whether `open` was called for the room, and `settle` was not."""
        return room in self._current

    # The threads that receive messages.

    def handle(self, message: messages.Message) -> None:
        """A message of a prefill rank. What is wrong with it fails its request or is dropped, and is logged."""
        try:
            if isinstance(message, messages.Ready | messages.Failed | messages.Drained):
                self._from_source(message)
            elif isinstance(message, messages.FirstGeneration):
                self._first_generation(message)
            else:
                raise ProtocolError("it goes the other way")
        except HeteroError as error:
            self.counters.add("dropped")
            logger.warning("%s: dropped a %s: %s", self.manifest.label, type(message).__name__, error)

    def gone(self, incarnations: frozenset[str]) -> None:
        """These prefill processes are no more: nothing of theirs arrives, and what they had begun has failed."""
        with self._lock:
            outgoing: Outgoing = []
            for inbox in list(self._inboxes.values()):
                for number, source in enumerate(inbox.source_set.sources):
                    if source.incarnation in incarnations:
                        outgoing += self._carry_out(inbox, inbox.machine.gone(number))
        self._send(outgoing)

    def _from_source(self, message: messages.Ready | messages.Failed | messages.Drained) -> None:
        with self._lock:
            inbox = self._inboxes.get((message.room, message.epoch))
            if inbox is None:
                return  # it has ended
            if not inbox.source_set.is_source(message.incarnation, message.source):
                raise ProtocolError(f"room {message.room}: source {message.source} is another process")
            inbox.progress = self._clock()
            machine = inbox.machine
            if isinstance(message, messages.Ready):
                try:
                    outgoing = self._ready(inbox, message)
                except HeteroError as error:
                    outgoing = self._fail(inbox, f"{inbox.source_set.sources[message.source].label}: {error}")
            elif isinstance(message, messages.Failed):
                label = inbox.source_set.sources[message.source].label
                reason = f"{label}: {message.reason or 'it failed without a reason'}"
                outgoing = self._carry_out(inbox, machine.peer_failed(message.source, reason))
            else:
                outgoing = self._carry_out(inbox, machine.drained(message.source))
        self._send(outgoing)

    def _ready(self, inbox: Inbox, message: messages.Ready) -> Outgoing:
        stage = inbox.source_set.sources[message.source].coordinates.pp_rank
        program = inbox.programs[stage]
        outgoing: Outgoing = []
        for number, said in enumerate(message.pieces):
            piece = Piece(said.role, said.layer, said.first_page, said.pages, said.tokens)
            sharers = program.sharers(piece, len(inbox.pages))
            if message.digests:
                inbox.digests.setdefault((stage, said.seq), {})[message.source] = message.digests[number]
            outgoing += self._carry_out(inbox, inbox.machine.ready(message.source, said.seq, piece, sharers))
        if message.total >= 0:
            outgoing += self._carry_out(inbox, inbox.machine.total(message.source, message.total))
        return outgoing

    def _first_generation(self, message: messages.FirstGeneration) -> None:
        with self._lock:
            epochs = [target.epoch for target in message.targets if target.identity == self._identity.control]
            inbox = self._inboxes.get((message.room, epochs[0])) if epochs else None
            if inbox is None or inbox.machine.status is not ReceivingStatus.OPEN:
                return
            inbox.progress = self._clock()
            try:
                totals = self._totals(inbox, message)
                inbox.first = message
                outgoing = self._carry_out(inbox, inbox.machine.first_generation(totals))
            except HeteroError as error:
                outgoing = self._fail(inbox, f"prefill's first token: {error}")
        self._send(outgoing)

    def _totals(self, inbox: Inbox, message: messages.FirstGeneration) -> dict[int, int]:
        """Pieces per stage that prefill must have sent, from what its scheduler says of the chunks."""
        if message.topology != inbox.source_set.topology:
            raise ProtocolError(f"it is of topology {message.topology}, bound was {inbox.source_set.topology}")
        wanted = -(-message.tokens // self.manifest.page_size)
        if wanted != len(inbox.pages) or len(message.page_ids) != wanted:
            raise ProtocolError(
                f"a prompt of {message.tokens} tokens has {wanted} pages; {len(message.page_ids)} at prefill, "
                f"{len(inbox.pages)} here"
            )
        return {
            stage: len(program.whole(message.chunks, message.tokens)) for stage, program in enumerate(inbox.programs)
        }

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
                    inbox.to_read = pieces_to_read(inbox)
                    outgoing += self._read_on(inbox)
                case lifetime.Complete():
                    outgoing += self._complete(inbox)
                case lifetime.Abort(reason):
                    if inbox.units:
                        outgoing += self._to(inbox, self._all(inbox), messages.Abort, reason=reason)
                case lifetime.Failed(reason):
                    logger.warning("%s: room %d failed: %s", self.manifest.label, inbox.room, reason)
                    self.counters.add("failures")
                    outgoing += self._drop(inbox)
                case lifetime.ReturnUnits():
                    outgoing += self._return_units(inbox)
        return outgoing

    def _dispatch(self, inbox: Inbox, arrived: Arrived) -> None:
        """Linear state is for the scheduler's thread: no forward pass may run between. The worker does the rest."""
        if arrived.piece.role is None:
            inbox.state_ready.append(arrived)
        else:
            self._worker.put(inbox, arrived)

    def _complete(self, inbox: Inbox) -> Outgoing:
        if not inbox.coverage.complete:
            # The machine counts messages; what the destination has is known here, and this is what counts.
            inbox.fault = f"all pieces have arrived, but nothing brought {inbox.coverage.missing()}"
            logger.error("%s: room %d: %s", self.manifest.label, inbox.room, inbox.fault)
            return self._to(inbox, self._all(inbox), messages.Abort, reason=inbox.fault)
        self.counters.add("requests")
        return self._to(inbox, self._all(inbox), messages.Finish)

    def _fail(self, inbox: Inbox, reason: str) -> Outgoing:
        return self._carry_out(inbox, inbox.machine.fail(reason))

    def _drop(self, inbox: Inbox) -> Outgoing:
        """A failed request merges nothing more: what was not begun is over."""
        waiting, inbox.state_ready = list(inbox.state_ready), type(inbox.state_ready)()
        if inbox.units:
            self._units.quarantine((inbox.room, inbox.epoch), {inbox.source_set.address})
        else:
            self._units.cancel((inbox.room, inbox.epoch))
        outgoing: Outgoing = []
        for arrived in waiting:
            outgoing += self._ended(inbox, arrived)
        return outgoing

    def _return_units(self, inbox: Inbox) -> Outgoing:
        owner = (inbox.room, inbox.epoch)
        if inbox.machine.status is ReceivingStatus.FAILED:
            self._units.drained(owner, inbox.source_set.address)
        else:
            self._units.release(owner)
        self._inboxes.pop(owner, None)
        return self._grant()

    def _grant(self) -> Outgoing:
        """Tell the sources of every request that has just been given its units."""
        outgoing: Outgoing = []
        for owner, offsets in self._units.grants():
            inbox = self._inboxes[owner]  # type: ignore[index]  # owners are (room, epoch)
            inbox.units = per_stage(offsets, len(inbox.source_set.stages))
            inbox.progress = self._clock()
            self._carry_out(inbox, inbox.machine.bound())
            outgoing += self._binds(inbox)
        return outgoing

    def _binds(self, inbox: Inbox) -> Outgoing:
        known, window = inbox.source_set, inbox.source_set.window
        place = self.manifest.coordinates
        outgoing: Outgoing = []
        for stage, units in zip(known.stages, inbox.units, strict=True):
            for number in stage.sources:
                if number not in known.registered:
                    known.registered.add(number)
                    outgoing += self._to(inbox, (number,), messages.Register, **self._registration())
                offset, nbytes = window.areas[number]
                outgoing += self._to(
                    inbox,
                    (number,),
                    messages.Bind,
                    rank=place.tp_rank,
                    ranks=place.tp_size,
                    pages=len(inbox.pages),
                    mode=inbox.mode,
                    fingerprint=known.plan.fingerprint_of(number),
                    units=units,
                    area_offset=offset,
                    area_bytes=nbytes,
                    pages_per_piece=dict(window.pages_per_piece),
                    verify=self.settings.verify,
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

    def _send(self, outgoing: Outgoing) -> None:
        """Post; the lock must be free. A source that cannot be reached fails the request."""
        later = outgoing
        while later:
            now, later = later, []
            for inbox, number, message in now:
                label = inbox.source_set.sources[number].label
                try:
                    self._post(inbox.source_set.endpoints[number], messages.encode(message))
                except Exception as error:
                    logger.warning("%s: no %s to %s: %s", self.manifest.label, type(message).__name__, label, error)
                    reason = f"{label} cannot be reached: {error}"
                    with self._lock:
                        if isinstance(message, messages.Register):
                            inbox.source_set.registered.discard(number)
                        later += self._fail(inbox, reason)
                        if isinstance(message, messages.Bind):  # it will never know where to write
                            later += self._carry_out(inbox, inbox.machine.drained(number))

    # Merging.

    def _merge_batch(self, inbox: Inbox, batch: Sequence[Arrived]) -> None:
        """On the worker's thread."""
        with self._lock:
            alive = self._is_open(inbox)
            inbox.running += alive
        problem = ""
        if alive:
            try:
                with self._lane.active():
                    for arrived in batch:
                        merge(self._arena, inbox.source_set.assembler, inbox, arrived)
                problem = self._differences(inbox, batch)
            except Exception as error:
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
                for arrived in batch:
                    merge(self._arena, inbox.source_set.assembler, inbox, arrived)
            done = self._forward.done()
            problem = self._differences(inbox, batch)
        except Exception as error:
            logger.exception("room %d: merge of linear state failed", inbox.room)
            problem = f"merge of linear state failed: {type(error).__name__}: {error}"
        with self._lock:
            if not problem:
                inbox.state_enqueued.extend((done, arrived) for arrived in batch)
                return
            outgoing = self._merged(inbox, batch, problem)
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
        outgoing = self._fail(inbox, problem) if problem else []
        inbox.progress = self._clock()
        for arrived in batch:
            if self._is_open(inbox):
                try:
                    inbox.coverage.add(arrived.piece)
                    self.counters.add("pieces")
                except ProtocolError as error:
                    outgoing += self._fail(inbox, str(error))
            outgoing += self._ended(inbox, arrived)
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

    def _differences(self, inbox: Inbox, batch: Sequence[Arrived]) -> str:
        """In verification mode what differs between a source's bytes and ours, or an empty text."""
        if not self.settings.verify:
            return ""
        for arrived in batch:
            with self._lock:
                said = inbox.digests.pop((arrived.stage, arrived.seq), {})
            if arrived.pulled:
                continue
            plan, piece = inbox.source_set.plan, arrived.piece
            own = verify.destination_digests(plan, piece, self._memory, inbox.pages, inbox.slot)
            difference = verify.compare(plan, piece, said, own)
            self.counters.add("verified")
            if difference:
                self.counters.add("differences")
                return f"{arrived.piece} differs from what prefill has: {difference}"
        return ""

    # Mode pull; the lock is held but in `_read_done`.

    def _read_on(self, inbox: Inbox) -> Outgoing:
        """Read the next pieces, or report that all has been read, or that a failed request reads no more."""
        inbox.batch = next_batch(inbox.to_read, inbox.units) if self._is_open(inbox) else []
        if not inbox.batch:
            return self._carry_out(inbox, inbox.machine.pulled())
        assert inbox.first is not None
        pages = inbox.first.page_ids.astype(np.int64)
        try:
            reads = reads_of(inbox, inbox.batch, self._arena.data_ptr(), pages, inbox.first.slot)
        except HeteroError as error:
            outgoing = self._fail(inbox, str(error))
            return outgoing + self._carry_out(inbox, inbox.machine.pulled())
        inbox.reading = len(reads)
        self.counters.add("reads", len(reads))
        self._puller.start(inbox, reads, self._read_done)
        return []

    def _read_done(self, inbox: Inbox, source: int, problem: str) -> None:
        """On a reader's thread: a source has been read from. When all have, the pieces are merged."""
        with self._lock:
            inbox.progress = self._clock()
            outgoing = self._fail(inbox, problem) if problem else []
            inbox.reading -= 1
            if not inbox.reading:
                inbox.unmerged = len(inbox.batch)
                if self._is_open(inbox):
                    for arrived in inbox.batch:
                        self._dispatch(inbox, arrived)
                else:
                    inbox.unmerged = 0
                    outgoing += self._read_on(inbox)
        self._send(outgoing)

    # Time.

    def _check_time(self, inbox: Inbox) -> None:
        """Bounded waits: for units, and for anything to happen."""
        now = self._clock()
        with self._lock:
            status, settings = inbox.machine.status, self.settings
            if status is ReceivingStatus.QUEUED and now - inbox.opened > settings.window_seconds:
                reason = (
                    f"no units of staging for {now - inbox.opened:.0f} s: {self._units.held} of {self._units.units} "
                    f"are in use, {self._units.quarantined} wait for a writer; raise SGLANG_HETERO_STAGING_MB"
                )
            elif status is ReceivingStatus.OPEN and now - inbox.progress > settings.stall_seconds:
                lacking = inbox.coverage.missing() or "the first token"
                sources = ", ".join(source.label for source in inbox.source_set.sources)
                reason = f"nothing has arrived for {now - inbox.progress:.0f} s from {sources}: {lacking} is missing"
            else:
                return
            outgoing = self._fail(inbox, reason)
        self._send(outgoing)

    @property
    def state(self) -> dict[str, int]:
        """What is held at the moment, for tests and status pages."""
        with self._lock:
            return {
                "rooms": len(self._current),
                "inboxes": len(self._inboxes),
                "units": self._units.units,
                "units_free": self._units.free,
                "units_held": self._units.held,
                "units_quarantined": self._units.quarantined,
                "waiting": self._units.waiting,
            }

    def close(self) -> None:
        """Stop the threads."""
        self._worker.stop()
        self._puller.close()
