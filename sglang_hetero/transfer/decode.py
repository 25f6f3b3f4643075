"""One decode rank's side of the transfer: who it asks, what arrives, and when a request is complete.

Threads that come here: one that receives messages (`handle`); SGLang's scheduler (`open`, `poll`, `fail`, `settle`);
those that watch over peers (`gone`, `lost`, `remind`, `awaited`) and over this rank (`doubts`, `check_integrity`);
and, in reception.py, workers that merge attention KV and, in mode pull, read.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from sglang_hetero.device import Done, at_once
from sglang_hetero.errors import HeteroError, ProtocolError, StagingError, TransferRefused

from . import integrity, messages
from .inbox import Inbox
from .lifetime import Receiving, ReceivingStatus
from .link import Awaited
from .outbox import Ids
from .pieces import Coverage, Piece
from .reception import MAX_OVER, Doubt, Outgoing, Progress, Reception, Writer
from .sources import SourceSet, source_set
from .staging import STAGING_OPTION

logger = logging.getLogger(__name__)

FENCE_WARNING_SECONDS = 5.0
"""A merge takes milliseconds; a fence that waits longer says so each time this has passed, or once if for a device."""
FENCE_POLL_SECONDS = 0.001
"""Between looks at a device that copies a failed request's state, or empties its pages."""


class DecodeSide(Reception):
    """The transfer at one decode rank."""

    @property
    def control_identity(self) -> bytes:
        """Under which the control services of prefill servers know this rank."""
        return self._identity.control

    def join(self, address: str, topology: messages.Topology) -> SourceSet:
        """What this rank would take from a prefill replica. Raises HeteroError if the two do not go together."""
        found = source_set(
            address,
            topology,
            self.manifest,
            self._memory,
            unit_bytes=self.settings.unit_bytes,
            units=self.settings.window,
        )
        need = self.settings.window * len(found.stages)
        if need > self._units.units:
            raise StagingError(
                f"{self.manifest.label}: a request from {len(found.stages)} pipeline stages of prefill at {address} "
                f"needs {need} units of staging, there are {self._units.units}; raise {STAGING_OPTION}"
            )
        if unequal := found.plan.unequal_drafts:
            logger.warning("%s", unequal)
        return found

    # SGLang's scheduler.

    def open(self, room: int, source_set: SourceSet, pages: Ids, slot: int) -> None:
        """A request has its pages (ids in this rank's pool, in order) and slot (-1 without linear state).

        Its window is taken when there are units, first come, first served; then the sources are told. What nobody sends
        is emptied here: call it between forward passes. Raises HeteroError for what can never work.
        """
        mode = self.settings.mode
        now = self._clock()
        ids = np.array(pages, dtype=np.int64)
        with self._lock:
            use = self._use(room)  # also of one that is refused: the other ranks may take it
            if room in self._current:
                raise TransferRefused(f"{self.manifest.label} has another request with room {room} under way")
        # Not before: nobody would wait for what is emptied for a request that is refused. No other thread opens any.
        emptied, problem = self._begin_empty(room, source_set, ids)
        with self._lock:
            self._epoch += 1
            inbox = Inbox(
                room,
                self._epoch,
                source_set,
                mode,
                source_set.programs_of(mode),
                Receiving(
                    source_set.stages,
                    pulls=any(each.pulls for each in source_set.programs_of(mode)),
                    lacking=lambda: self._lacking(inbox),
                ),
                Coverage(source_set.plan, len(ids)),
                ids,
                slot,
                perf=self.perf.opened(room, len(ids)),
                opened=now,
                progress=now,
                use=use,
                emptied=emptied,
            )
            if not problem:
                inbox.coverage.emptied()
            self._units.request((room, inbox.epoch), self.settings.window * len(source_set.stages))
            self._inboxes[room, inbox.epoch] = self._current[room] = inbox
            outgoing = self._fail_here(inbox, problem)
            outgoing += self._grant()
        self._send(outgoing)

    def _begin_empty(self, room: int, source_set: SourceSet, pages: Ids) -> tuple[Done, str]:
        """Empty what nobody sends in these pages. Tells when the device has, and why that is not possible, if so."""
        if not source_set.plan.missing:
            return at_once, ""
        done, problem = at_once, ""
        try:
            try:
                with self._forward.active():
                    source_set.assembler.begin_empty(pages)
            finally:
                done = self._forward.done()  # also of what was enqueued before an error
        except Exception as error:  # SGLang's scheduler serves other requests, and would end with it
            logger.exception("room %d: the pages of its draft caches cannot be emptied", room)
            problem = f"its draft caches cannot be emptied: {type(error).__name__}: {error}"
        return done, problem

    def _use(self, room: int) -> str:
        """A name for this use of a room, without asking the other ranks of this server: they count the same.

        They are given the same requests in the same order. A use that only some of them refuse fails, and the next one
        has the same name everywhere. The lock is held.
        """
        count = self._uses.pop(room, 0) + 1
        self._uses[room] = count
        while len(self._uses) > MAX_OVER:
            self._uses.popitem(last=False)
        return f"{self._identity.server} {count}"

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
        settings = self.settings
        with self._lock:
            overdue = inbox.overdue(
                self._clock(), settings.window_seconds, settings.stall_seconds, self._units, self._doubted
            )
            outgoing = self._fail(inbox, f"{self.manifest.label}: {overdue}") if overdue else []
            again = self._remind()
        self._send(outgoing)
        self._send_again(again)
        with self._lock:
            status = inbox.machine.status
            if status is ReceivingStatus.FAILED:
                return Progress.FAILED
            if status is ReceivingStatus.COMPLETE:
                inbox.perf.complete()
                return Progress.COMPLETE
            return Progress.WAITING if status is ReceivingStatus.QUEUED else Progress.ARRIVING

    def _doubted(self) -> str:
        return "; ".join(map(str, self.doubts()))

    def first(self, room: int) -> messages.FirstGeneration:
        """The first token and what belongs to it, of a request that is complete."""
        first = self._current[room].first
        assert first is not None
        return first

    def reason(self, room: int) -> str:
        """Why a request has failed."""
        return self._current[room].machine.reason or ""

    def waits_for(self, room: int) -> str:
        """What a request lacks, and of whom; an empty text if nothing."""
        with self._lock:
            return self._current[room].waits_for()

    def fail(self, room: int, reason: str) -> None:
        """Give a request up; no effect on one that has ended."""
        with self._lock:
            inbox = self._current.get(room)
            outgoing = self._fail(inbox, reason) if inbox is not None else []
        self._send(outgoing)

    def remind(self) -> None:
        """Say again what may have been lost, also of failed requests whose units wait for a source.

        `poll` does, too; this is for a thread that lives when SGLang polls nothing.
        """
        with self._lock:
            again = self._remind()
        self._send_again(again)

    def settle(self, room: int) -> None:
        """SGLang lets go of the request: after this call nothing of ours touches its pages and slot any more."""
        self.fail(room, f"{self.manifest.label}: SGLang has ended the request there before all of it had arrived")
        with self._quiet:
            inbox = self._current.pop(room, None)
            if inbox is None:
                return
            self._wait_for_device(inbox)
            outgoing = self._finish_state(inbox)
            while inbox.running:
                if not self._quiet.wait(FENCE_WARNING_SECONDS):
                    logger.warning("room %d: waiting for a merge to end before its pages are freed", room)
        self._send(outgoing)

    def _wait_for_device(self, inbox: Inbox) -> None:
        """Until the device has carried out what it was given for the request. The lock is held, but while it waits.

        Linear state that it is still copying lies in units that would be given away, and pages that it is still
        emptying would be another request's.
        """
        told_at: float | None = time.monotonic() + FENCE_WARNING_SECONDS
        while (emptying := not inbox.emptied()) or any(not done() for done, _ in inbox.state_enqueued):
            if told_at is not None and time.monotonic() >= told_at:
                told_at = None
                logger.warning(
                    "room %d: %s has waited %.0f s for its device to %s, and goes on waiting: pages and slot cannot be "
                    "freed before; see whether the device is busy with other work or hangs",
                    inbox.room,
                    self.manifest.label,
                    FENCE_WARNING_SECONDS,
                    "empty the pages of its draft caches" if emptying else "copy its linear state",
                )
            self._quiet.wait(FENCE_POLL_SECONDS)

    def holds(self, room: int) -> bool:
        """Whether `open` was called for the room, and `settle` was not."""
        return room in self._current

    # The threads that receive messages.

    def handle(self, message: messages.Message) -> None:
        """A message of a prefill rank. What is wrong with it fails its request, or is dropped and counted."""
        try:
            if isinstance(message, messages.Ready | messages.Failed | messages.Drained):
                self._from_source(message)
            elif isinstance(message, messages.FirstGeneration):
                self._first_generation(message)
            else:
                raise ProtocolError("it goes the other way")
        except HeteroError as error:
            self.counters.add("dropped")
            self._faults.note(f"dropped a {type(message).__name__}", error)

    def gone(self, incarnations: frozenset[str], why: str = "is gone") -> None:
        """These prefill processes are no more: nothing of theirs arrives, and what they had begun has failed.

        why: continues the name of a process, in the reason that its requests fail with.
        """
        self._lose(incarnations, why, ended=True)

    def lost(self, incarnations: frozenset[str], why: str) -> None:
        """These prefill processes take no part any more: what they had begun has failed. Whether they still write is
        not known, so units stay apart until they have drained or are `gone`."""
        self._lose(incarnations, why, ended=False)

    def _lose(self, incarnations: frozenset[str], why: str, *, ended: bool) -> None:
        with self._lock:
            outgoing: Outgoing = []
            for inbox in list(self._inboxes.values()):
                for number, source in enumerate(inbox.source_set.sources):
                    if source.incarnation in incarnations:
                        outgoing += self._fail(inbox, f"{source.label} {why}")
                        if ended:
                            outgoing += self._source_gone(inbox, number)
        self._send(outgoing)

    def _from_source(self, message: messages.Ready | messages.Failed | messages.Drained) -> None:
        with self._lock:
            inbox = self._inboxes.get((message.room, message.epoch))
        if inbox is None:  # it has ended
            if isinstance(message, messages.Ready):
                self._answer_late(message)
            return
        with self._lock:
            if not inbox.source_set.addressees.is_source(message.incarnation, message.source):
                raise ProtocolError(f"room {message.room}: source {message.source} is another process")
            inbox.heard.add(message.source)
            self._heard.note(message.incarnation, self._clock())
            machine, label = inbox.machine, inbox.source_set.sources[message.source].label
            before = machine.news
            if isinstance(message, messages.Ready):
                inbox.perf.ready()
                try:
                    outgoing = self._ready(inbox, message)
                except HeteroError as error:
                    outgoing = self._fail(inbox, f"{label}: {error}")
            elif isinstance(message, messages.Failed):
                reason = messages.attributed(label, message.reason or "it gives no reason; see its log")
                outgoing = self._carry_out(inbox, machine.peer_failed(message.source, reason))
            else:
                outgoing = self._fail(inbox, f"{label} has stopped sending without a reason; see its log")
                outgoing += self._carry_out(inbox, machine.drained(message.source))
            if machine.news != before:  # what is only said again must not keep a request alive that stands still
                inbox.progress = self._clock()
        self._send(outgoing)

    def _ready(self, inbox: Inbox, message: messages.Ready) -> Outgoing:
        stage = inbox.source_set.sources[message.source].coordinates.pp_rank
        program = inbox.programs[stage]
        outgoing: Outgoing = []
        for number, said in enumerate(message.pieces):
            if message.digests and self.settings.verify:  # nobody looks at them else
                key = (stage, said.seq, message.reads)
                inbox.digests.setdefault(key, {})[message.source] = message.digests[number]
            if message.reads:
                continue  # nothing was written
            piece = Piece(said.role, said.layer, said.first_page, said.pages, said.tokens)
            sharers = program.sharers(piece, len(inbox.pages))
            outgoing += self._carry_out(inbox, inbox.machine.ready(message.source, said.seq, piece, sharers))
        if message.total >= 0:
            inbox.places[message.source] = message.place
            outgoing += self._carry_out(inbox, inbox.machine.total(message.source, message.total))
        return outgoing

    def _first_generation(self, message: messages.FirstGeneration) -> None:
        with self._lock:
            epochs = [target.epoch for target in message.targets if target.identity == self._identity.control]
            inbox = self._inboxes.get((message.room, epochs[0])) if epochs else None
            if inbox is None or inbox.machine.status is not ReceivingStatus.OPEN:
                return
            if message.incarnation not in {source.incarnation for source in inbox.source_set.sources}:
                raise ProtocolError(f"room {message.room}: it is from another process than the request was bound to")
            self._heard.note(message.incarnation, self._clock())
            if inbox.first == message:
                return  # told twice
            inbox.progress = self._clock()
            try:
                if inbox.first is not None:
                    raise ProtocolError("it has been told before, and otherwise")
                totals = inbox.totals(message)
                inbox.first = message
                inbox.perf.first_generation()
                outgoing = self._carry_out(inbox, inbox.machine.first_generation(totals))
            except HeteroError as error:
                outgoing = self._fail(inbox, f"the first token of prefill at {inbox.source_set.address}: {error}")
        self._send(outgoing)

    def doubts(self) -> list[Doubt]:
        """Failed requests whose units are quarantined, those that failed first first."""
        with self._lock:
            now = self._clock()
            failed = [inbox for inbox in self._inboxes.values() if inbox.machine.status is ReceivingStatus.FAILED]
            return [
                Doubt(
                    inbox.room,
                    inbox.epoch,
                    sum(map(len, inbox.units)),
                    now - inbox.ended,
                    tuple(
                        Writer(
                            inbox.source_set.sources[number].label,
                            inbox.source_set.sources[number].incarnation,
                            inbox.source_set.sessions[number],
                        )
                        for number in sorted(inbox.machine.may_write | inbox.in_doubt)
                    ),
                )
                for inbox in sorted(failed, key=lambda inbox: inbox.ended)
            ]

    def awaited(self) -> dict[str, Awaited]:
        """The prefill processes that requests here have to do with, by incarnation; no I/O."""
        with self._lock:
            # By identity of the source set, of which there are few: units by number of the source.
            kept: dict[int, tuple[SourceSet, dict[int, int]]] = {}
            for inbox in self._inboxes.values():
                known, units = kept.setdefault(id(inbox.source_set), (inbox.source_set, {}))
                if inbox.machine.status is ReceivingStatus.FAILED:
                    own = sum(map(len, inbox.units))
                    for number in inbox.machine.may_write | inbox.in_doubt:
                        units[number] = units.get(number, 0) + own
                elif len(units) < len(known.sources):
                    for number in self._all(inbox):
                        units.setdefault(number, 0)
        found: dict[str, Awaited] = {}
        for known, units in kept.values():
            for number, source in enumerate(known.sources):
                if number in units:
                    former = found.get(source.incarnation)
                    more = 0 if former is None else former.units
                    found[source.incarnation] = Awaited(
                        source.label,
                        known.address,
                        known.sessions[number],
                        known.endpoints[number],
                        units[number] + more,
                        self._heard.last(source.incarnation),
                    )
        return found

    def check_integrity(self) -> list[str]:
        """Where the books do not agree, and which threads have ended; empty if all is right. No I/O."""
        with self._lock:
            wrong = integrity.receiving(self._units, self._inboxes, self._current)
        return [*wrong, *(fault for fault in (self._worker.fault, self._puller.fault) if fault)]

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
