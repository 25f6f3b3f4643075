"""Source side: the requests of one prefill rank on their way out: what may be written is, and an end is told to all.

One lock guards the books; it is never held while bytes move or a message is posted.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.merge.assemble import Memory
from sglang_hetero.perf.records import Perf, silent

from . import fields, messages
from .counters import Counters
from .device import Lane
from .engine.base import Engine
from .lifetime import Epochs, SendingStatus
from .link import Post
from .outbox import Destination, Ids, Outbox, Peer
from .pieces import Piece
from .writer import PackBuffers, Writer

logger = logging.getLogger(__name__)

MAX_PARKED = 1024
"""Bind messages that wait for their sender's registration or for the topology: a matter of moments."""
MAX_LET_GO = 1 << 14
"""Requests of the last UNCLAIMED_SECONDS that are remembered so; those on SGLang's own path are among them."""
MAX_REPLACED = 1024
"""Former decode processes that are remembered, so that a last word of theirs does not undo a restart."""
MAX_ROOMS = 1 << 16
"""Room numbers whose last use is remembered: far more than requests can be under way."""
UNCLAIMED_SECONDS = 60.0
"""How long it is remembered that a request has failed that only one side has been asked for yet."""
PULL_HOLD_SECONDS = 30.0
"""How long pages of a failed request are kept for a decode rank that may be reading them; SGLang holds pages on decode
as long for a prefill that may be writing them."""
BATCHES_PER_WINDOW = 4
"""A window of full units goes out in so many writes, so that decode merges one part of it while the next is on its
way; of pieces that do not fill their units as many go at a time as have the same bytes."""


class Events(Protocol):
    """What the process around learns about a request; called from any thread, without the lock."""

    def bound(self, room: int) -> None:
        """Every decode rank has told where the request goes."""

    def succeeded(self, room: int) -> None:
        """Every decode rank has everything: pages and slot may be freed."""

    def forgotten(self, room: int) -> None:
        """Nobody has asked prefill for it: what is kept of it may go. Called with the lock held."""

    def failed(self, room: int, reason: str) -> None:
        """It will not arrive; no new write of it begins."""


@dataclass(frozen=True)
class Held:
    """What this rank holds of a request: page ids, slot, and how many tokens."""

    pages: Ids
    slot: int
    tokens: int
    moves: int
    """Outbox.moves at that time."""


class Dispatch:
    """The requests that one prefill rank sends: books and movers. `PrefillSide` is what others call."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        engine: Engine,
        memory: Memory,
        packs: PackBuffers,
        lane: Lane,
        post: Post,
        control: Callable[[messages.Message], None],
        events: Events,
        stall_seconds: float,
        perf: Perf | None = None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """control: sends to the control service. stall_seconds: without any progress a request fails."""
        self.manifest = manifest
        self.counters = counters or Counters()
        self.perf = perf or silent(manifest.side, manifest.label)
        self._writer = Writer(engine, memory, packs, lane)
        self._busy_waits = engine.busy_waits
        self._post, self._control, self._events = post, control, events
        self._stall_seconds, self._clock = stall_seconds, clock
        self._lock = threading.RLock()
        self._sources: tuple[Manifest, ...] = ()
        self._topology = ""
        self._number = -1
        self._peers: dict[str, Peer] = {}
        self._rooms: dict[int, Outbox] = {}
        # Also those of requests that have ended here but still have a write in flight. By incarnation, room and epoch.
        self._destinations: dict[tuple[str, int, int], Destination] = {}
        self._claimed: dict[int, Callable[[], object | None]] = {}
        self._let_go: OrderedDict[int, float] = OrderedDict()  # rooms that ended before decode had bound them, and when
        self._epochs = Epochs(keep=MAX_ROOMS)
        self._replaced: OrderedDict[str, None] = OrderedDict()  # decode processes whose place another one has taken
        self._parked: OrderedDict[tuple[str, int, int], messages.Bind] = OrderedDict()
        self._early: dict[tuple[str, int, int], int] = {}  # what was acknowledged of a request whose Bind is parked

    # For SGLang's scheduler.

    def claim(self, room: int, owner: object | None = None) -> None:
        """SGLang has a sender for the request, which will `release` it. owner: the sender; the claim ends with it."""
        with self._lock:
            self._sweep()
            self._claimed[room] = (lambda: True) if owner is None else weakref.ref(owner)
            self._let_go.pop(room, None)

    def _is_claimed(self, room: int) -> bool:
        claim = self._claimed.get(room)
        return claim is not None and claim() is not None

    def _remember(self, room: int | None, now: float) -> None:
        """Add to the rooms that ended before they were bound; the old ones are forgotten. The lock is held."""
        if room is not None:
            self._let_go[room] = now
            self._let_go.move_to_end(room)
        while self._let_go and (
            len(self._let_go) > MAX_LET_GO or now - next(iter(self._let_go.values())) > UNCLAIMED_SECONDS
        ):
            self._let_go.popitem(last=False)

    def _sweep(self) -> None:
        """Drop what no sender has come for in a long time, ended or not: the client has reached decode only.

        The lock is held.
        """
        now = self._clock()
        self._remember(None, now)
        stale = [
            room
            for room, outbox in self._rooms.items()
            if not self._is_claimed(room)
            and now - outbox.progress > (UNCLAIMED_SECONDS if outbox.ended else self._stall_seconds)
        ]
        for room in stale:
            outbox = self._rooms.pop(room)
            self._claimed.pop(room, None)
            for destination in outbox.destinations.values():
                destination.sending.abort("prefill was never asked for it")
            self._events.forgotten(room)
            self.perf.sent_end(room, "prefill was never asked for it")
            logger.info("%s: room %d is forgotten: prefill has no request for it", self.manifest.label, room)

    def fail(self, room: int, reason: str, only: Destination | None = None) -> None:
        """End a request on this side: no write of it begins any more, and every decode rank is told why.

        only: the destination that asked for it, if it is another one's room by now nothing else ends.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            if only is not None and (outbox is None or outbox.destinations.get(only.rank) is not only):
                only.sending.abort(reason)
                return
            if outbox is None or outbox.ended:
                return
            outbox.ended, outbox.reason, outbox.progress = True, reason, self._clock()
            destinations = list(outbox.destinations.values())
            for destination in destinations:
                destination.sending.abort(reason)
        logger.warning("%s: room %d failed: %s", self.manifest.label, room, reason)
        self.counters.add("failures")
        self.perf.sent_end(room, reason)
        for destination in destinations:
            if destination is not only:
                self._tell(
                    destination.peer, messages.Failed, room, destination.epoch, source=self._number, reason=reason
                )
            self._farewell(destination)
        self._events.failed(room, reason)

    def _advance(self, outbox: Outbox) -> None:
        """Let every destination have what has been computed of a request."""
        try:
            with self._lock:
                for destination in outbox.destinations.values():
                    outbox.extend(destination)
                    self._wake(destination)
        except HeteroError as error:
            self.fail(outbox.room, f"{self.manifest.label}: {error}")

    def may_free(self, room: int) -> bool:
        """Whether pages and slot of a request that has failed here may be freed.

        Decode may be reading them (mode pull), and would take what it reads for the request's until it knows better:
        so it has to say that it does, or PULL_HOLD_SECONDS have to pass.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or not outbox.closed or self._clock() - outbox.progress > PULL_HOLD_SECONDS:
                return True
            return not any(
                destination.program.pulls and not destination.left for destination in outbox.destinations.values()
            )

    def _fail_of(self, destination: Destination, reason: str) -> None:
        """End the request that this destination belongs to, which need not be the room's present one."""
        with self._lock:
            outbox = self._rooms.get(destination.room)
            current = outbox is not None and outbox.destinations.get(destination.rank) is destination
            if not current:
                destination.sending.abort(reason)
        if current:
            self.fail(destination.room, reason)
        else:
            self._farewell(destination)

    def failure(self, room: int) -> str | None:
        """Why a request has failed on this side; None if it has not."""
        with self._lock:
            outbox = self._rooms.get(room)
            return outbox.reason if outbox is not None else None

    def release(self, room: int) -> None:
        """SGLang is done with the request; what is still on its way is cut off first."""
        self.fail(room, "the request ended on the prefill side")
        with self._lock:
            self._claimed.pop(room, None)
            outbox = self._rooms.pop(room, None)
            if outbox is None or not outbox.bound:
                self._remember(room, self._clock())
            if outbox is None:
                return
            for destination in outbox.destinations.values():
                # A write that is under way or in doubt is asked about later.
                if destination.sending.drained:
                    self._destinations.pop((destination.peer.incarnation, room, destination.epoch), None)
        self._unpark(room)

    def check(self, room: int) -> None:
        """Fail a request that stands still: called when SGLang polls, also moves on chunks that were not complete."""
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or outbox.ended:
                return
            idle = self._clock() - outbox.progress
            waits_for = [
                each.peer.label for each in outbox.destinations.values() if each.sending.status is SendingStatus.SENDING
            ]
        self._advance(outbox)
        if outbox.closed and idle > self._stall_seconds:
            self.fail(room, f"no progress for {idle:.0f} s, waiting for {', '.join(waits_for)}")

    def _unpark(self, room: int | None = None) -> None:
        """Look again at what has waited: for a registration, the topology, or the end of its room's last use.

        room: only at what is about that one.
        """
        raise NotImplementedError

    # A mover.

    def _wake(self, destination: Destination) -> None:
        """Hand a destination that has something to write to its mover; the lock is held."""
        mover = destination.peer.mover
        runnable = destination.sending.runnable or destination.owes_total
        if mover is not None and runnable and not destination.queued:
            destination.queued = True
            mover.wake(destination)

    def _turn(self, destination: Destination) -> bool:
        with self._lock:
            outbox = self._rooms.get(destination.room)
            if outbox is None or outbox.moving:
                destination.queued = False
                return False
            budget = max(1, len(destination.units) // BATCHES_PER_WINDOW) * destination.area_bytes
            taken = destination.sending.take(min(destination.fitting(budget), fields.MAX_PIECES))
            batch = [(seq, destination.sequence[seq]) for seq in taken]
            if not (batch or destination.owes_total):
                destination.queued = False
                return False
            source = Held(outbox.pages, outbox.slot, outbox.tokens, outbox.moves)
        try:
            problem = self._write(destination, batch, source)
        except Exception as error:
            logger.exception("room %d to %s", destination.room, destination.peer.label)
            problem = f"{type(error).__name__}: {error}"
            with self._lock:
                if destination.sending.in_flight:
                    destination.sending.write_failed(problem, in_doubt=True)
        with self._lock:
            destination.queued = runnable = not problem and (destination.sending.runnable or destination.owes_total)
            if outbox is not None:
                outbox.progress = self._clock()
        if problem:
            self._fail_of(destination, f"{self.manifest.label} {problem}")
        if destination.goodbye:
            self._farewell(destination)
        return runnable

    def _write(self, destination: Destination, batch: Sequence[tuple[int, Piece]], source: Held) -> str:
        """Write a batch, which may be empty, and announce it; what went wrong, or an empty text."""
        written = self._writer.write(destination, batch, source.pages, source.slot)
        with self._lock:
            if written.problem:
                destination.sending.write_failed(written.problem, written.in_doubt)
                return written.problem
            outbox = self._rooms.get(destination.room)
            moved = outbox is not None and outbox.moves != source.moves
            if batch and moved and destination.sending.status is SendingStatus.SENDING:
                self.counters.add("again")
                destination.sending.take_back()
                return ""
            if batch:
                destination.sending.wrote()
            if destination.sending.status is not SendingStatus.SENDING:
                return ""
            total = messages.Ready().total
            if destination.owes_total and destination.sending.total is not None:
                total, destination.total_told = destination.sending.total, True
        reads = total >= 0 and destination.program.pulls
        if reads and destination.verify:
            self._tell_reads(destination, source)
        self.counters.add("writes")
        self.counters.add("descriptors", sum(written.descriptors.values()))
        self.counters.add("bytes", sum(written.nbytes.values()))
        if written.pieces:
            destination.perf.wrote(
                destination.peer.label, written.started, written.ended, written.nbytes, written.descriptors
            )
        told = not (written.pieces or total >= 0) or self._tell(
            destination.peer,
            messages.Ready,
            destination.room,
            destination.epoch,
            source=self._number,
            pieces=written.pieces,
            total=total,
            digests=written.digests,
            place=messages.place_of(source.pages, source.slot) if reads else "",
        )
        return "" if told else f"could not reach {destination.peer.label}"

    def _tell_reads(self, destination: Destination, source: Held) -> None:
        """Digests of what decode will read itself, before it knows that it may."""
        reads = list(enumerate(destination.program.reads(source.tokens)))
        for start in range(0, len(reads), fields.MAX_PIECES):
            batch = reads[start : start + fields.MAX_PIECES]
            pieces, digests = self._writer.digests_of(destination, batch, source.pages, source.slot)
            self._tell(
                destination.peer,
                messages.Ready,
                destination.room,
                destination.epoch,
                source=self._number,
                pieces=pieces,
                digests=digests,
                reads=True,
            )

    def _tell(self, peer: Peer, kind: Callable[..., messages.Message], room: int, epoch: int, **fields: Any) -> bool:
        """Post to a decode rank; False if it cannot be reached. It has its own timeout then."""
        message = kind(room=room, epoch=epoch, incarnation=self.manifest.incarnation, **fields)
        try:
            self._post(peer.endpoint, messages.encode(message))
        except Exception as error:
            logger.warning("%s: no %s to %s: %s", self.manifest.label, type(message).__name__, peer.label, error)
            return False
        return True

    def _farewell(self, destination: Destination) -> None:
        """Tell the peer that nothing of the request will be written any more, once that is so."""
        with self._lock:
            destination.goodbye = destination.sending.in_flight
            drained = destination.sending.drained
            if drained:
                key = (destination.peer.incarnation, destination.room, destination.epoch)
                self._destinations.pop(key, None)
        if drained:
            self._tell(destination.peer, messages.Drained, destination.room, destination.epoch, source=self._number)
