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
from functools import partial
from typing import Any, Protocol

from sglang_hetero.device import Lane
from sglang_hetero.errors import HeteroError
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.merge.assemble import Memory
from sglang_hetero.perf.records import Perf, silent

from . import fields, messages
from .counters import Counters
from .engine.base import Engine
from .faults import Faults
from .lifetime import Epochs, SendingStatus
from .link import Post
from .outbox import Destination, Ids, Outbox, Peer
from .pieces import Piece
from .writer import PackBuffers, Writer

logger = logging.getLogger(__name__)

MAX_PARKED = 1024
"""Bind messages that wait for their sender's registration or for the topology: a matter of moments."""
MAX_PEERS = 1024
"""Decode ranks that are known, each with a thread. One more takes the place of one that has nothing under way."""
MAX_OPEN = 1 << 14
"""Requests that decode ranks have bound or given up here and SGLang has not let go of: more than any server runs."""
MAX_LET_GO = 1 << 14
"""Requests of the last UNCLAIMED_SECONDS that are remembered so; those on SGLang's own path are among them."""
MAX_FORMER = MAX_PEERS
"""Former decode processes that are remembered, so that a last word of theirs does not undo a restart, and one that was
only taken for dead is known again."""
MAX_ROOMS = 1 << 16
"""Room numbers whose last use is remembered: far more than requests can be under way."""
SWEEP_SECONDS = 1.0
"""Between two looks for what is to be forgotten after UNCLAIMED_SECONDS or longer."""
UNCLAIMED_SECONDS = 60.0
"""How long it is remembered that a request has failed that only one side has been asked for yet."""
PULL_HOLD_SECONDS = 30.0
"""How long pages of a failed request are kept for a decode rank that may be reading them; SGLang holds pages on decode
as long for a prefill that may be writing them."""
BATCHES_PER_WINDOW = 4
"""A window of full units goes out in so many writes, so that decode merges one part of it while the next is on its
way; of pieces that do not fill their units as many go at a time as have the same bytes."""


Claim = Callable[[], object | None]
"""Gives SGLang's sender of a request, None when that is gone."""


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


@dataclass
class Former:
    """A decode process that was forgotten: another one has its place, it was taken for dead, or there were too many."""

    peer: Peer
    undrained: tuple[Destination, ...] | None = None
    """Those of which bytes may still be on their way, without their pieces; None until all its requests have failed."""


@dataclass
class Parked:
    """A Bind that waits until it can be looked at."""

    message: messages.Bind
    acked: int = 0
    """What decode has acknowledged meanwhile of its stage: others have sent all of that."""


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
        self._faults = Faults(manifest.label, logger)
        self.perf = perf or silent(manifest.side, manifest.label)
        self._writer = Writer(engine, memory, packs, lane)
        self._device = lane.device
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
        self._claimed: dict[int, Claim] = {}
        self._let_go: OrderedDict[int, float] = OrderedDict()  # rooms that ended before decode had bound them, and when
        self._epochs = Epochs(keep=MAX_ROOMS)
        self._former: OrderedDict[str, Former] = OrderedDict()  # decode processes that were forgotten
        self._parked: OrderedDict[tuple[str, int, int], Parked] = OrderedDict()
        self._swept = float("-inf")

    # For SGLang's scheduler.

    def retire(self, room: int) -> None:
        """SGLang makes a sender for the room: what a former one has left behind that is gone without `release` ends.

        SGLang does so when a client gives a prompt up between two of its chunks.
        """
        with self._lock:
            claim = self._claimed.get(room)
            if claim is None or claim() is not None:
                return
            outbox = self._rooms.get(room)
            if outbox is not None and outbox.owner is not claim:
                outbox = None  # what a later request has brought already
            reason = f"{self.manifest.label}: SGLang has let go of the request there, as it does when the client aborts"
            ended = outbox is not None and self._settle(outbox, reason)
        self._leave(room, outbox, claim, ended, said=False)

    def claim(self, room: int, owner: object | None = None) -> None:
        """SGLang has a sender for the request, which will `release` it. owner: the sender; the claim ends with it.

        What decode has said of the request is said to SGLang again: `retire` may have made it forget.
        """
        self._sweep()
        with self._lock:
            claim = self._claimed[room] = (lambda: True) if owner is None else weakref.ref(owner)
            self._let_go.pop(room, None)
            outbox = self._rooms.get(room)
            if outbox is not None and (outbox.owner is None or outbox.owner() is None):
                outbox.owner = claim
            bound = outbox is not None and outbox.owner is claim and outbox.bound and not outbox.ended
        if bound:
            self._events.bound(room)

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
        """Drop what no sender has come for in a long time, ended or not: the client has reached decode only."""
        with self._lock:
            now = self._clock()
            if now - self._swept < SWEEP_SECONDS:
                return
            self._swept = now
            self._remember(None, now)
            for room in [room for room, claim in self._claimed.items() if claim() is None and room not in self._rooms]:
                del self._claimed[room]  # SGLang does not always say that it lets go
                self._events.forgotten(room)
            stale = [
                outbox
                for room, outbox in self._rooms.items()
                if not self._is_claimed(room)
                and now - outbox.progress > (UNCLAIMED_SECONDS if outbox.ended else self._stall_seconds)
            ]
            reason = f"{self.manifest.label}: prefill was never asked for it; send each request to both servers"
            ended = [(outbox, self._claimed.get(outbox.room), self._settle(outbox, reason)) for outbox in stale]
        for outbox, claim, newly in ended:
            self._leave(outbox.room, outbox, claim, newly, said=False)

    def fail(self, room: int, reason: str, of: Destination | None = None, *, asked: bool = False) -> None:
        """End a request on this side: no write of it begins any more, and every decode rank is told why.

        of: the destination that is the cause; if the room is another request's by now nothing else ends. asked: its
        decode rank has given the request up itself, and need not be told why.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            current = of is None or (outbox is not None and outbox.destinations.get(of.rank) is of)
            ended = outbox if outbox is not None and current and self._settle(outbox, reason) else None
            if of is not None:
                of.sending.abort(reason)
        if ended is not None:
            self._settled(ended, of if asked else None)
        elif of is not None:
            self._farewell(of)

    def _settle(self, outbox: Outbox, reason: str | None) -> bool:
        """Every end of a request on this side comes through here, once; the lock is held.

        reason: why it failed, None if every decode rank has everything. False: it had ended before. Otherwise
        `_settled` has to follow when the lock is free.
        """
        if outbox.ended:
            return False
        outbox.ended, outbox.reason, outbox.progress = True, reason, self._clock()
        outbox.first = outbox.told = None
        if reason is not None:
            outbox.told_end = False
            for destination in outbox.destinations.values():
                destination.sending.abort(reason)
        return True

    def _settled(self, outbox: Outbox, asked: Destination | None = None) -> None:
        """What is owed when a request has ended here: figures, decode ranks, SGLang. asked: is not told why."""
        room, reason = outbox.room, outbox.reason
        try:
            self.counters.add("requests" if reason is None else "failures")
            self.perf.sent_end(room, reason)
            if reason is None:
                self._events.succeeded(room)
                return
            logger.warning("%s: room %d failed: %s", self.manifest.label, room, reason)
            for destination in list(outbox.destinations.values()):
                if destination is not asked:
                    self._tell_failed(destination.peer, room, destination.epoch, reason)
                self._farewell(destination)
        finally:
            outbox.told_end = True
        self._events.failed(room, reason)

    def _tell_failed(self, peer: Peer, room: int, epoch: int, reason: str) -> None:
        """Tell a decode rank why it will not get a request."""
        self._tell(peer, messages.Failed, room, epoch, source=self._number, reason=reason)

    def _tell_drained(self, peer: Peer, room: int, epoch: int) -> None:
        """Tell a decode rank that nothing of a request will be written to it any more."""
        self._tell(peer, messages.Drained, room, epoch, source=self._number)

    def _drop(self, outbox: Outbox) -> None:
        """A request is no longer the room's; the lock is held. A write under way or in doubt is asked about later."""
        self._rooms.pop(outbox.room, None)
        for destination in outbox.destinations.values():
            if destination.sending.drained:
                self._destinations.pop(destination.key, None)

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

    def failure(self, room: int) -> str | None:
        """Why a request has failed on this side, once decode has been told; None before, and if it has not."""
        with self._lock:
            outbox = self._rooms.get(room)
            return outbox.reason if outbox is not None and outbox.told_end else None

    def explain(self, room: int) -> str:
        """Why a request has failed that SGLang lets go of: on this rank, or, as far as this one knows, on another."""
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is not None and outbox.reason is not None:
                return outbox.reason
            waits = "" if outbox is None else outbox.waits_for()
        here = f"{self.manifest.label} {f'waited for {waits}' if waits else 'waits for nobody'}"
        return f"another rank of this prefill server has failed it, whose log says why; {here}"

    def release(self, room: int, owner: object | None = None) -> None:
        """SGLang is done with the request; what is still on its way is cut off first.

        owner: the sender that lets go. What is of a later one of the same room stays.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is not None and owner is not None and not outbox.belongs_to(owner):
                outbox = None
            reason = f"{self.manifest.label}: SGLang has ended the request there before decode had all of it"
            ended = outbox is not None and self._settle(outbox, reason)
            claim = self._claimed.get(room)
            if claim is not None and owner is not None and claim() not in (None, owner):
                claim = None
        self._leave(room, outbox, claim, ended)

    def _leave(self, room: int, outbox: Outbox | None, claim: Claim | None, ended: bool, *, said: bool = True) -> None:
        """Let go of one use of a room, so that the next one may have it.

        outbox, claim: what is of that use. ended: `_settle` has just ended it. said: SGLang has said that it lets go;
        otherwise nothing is done if a sender has come for the room meanwhile.
        """
        if ended and outbox is not None:
            self._settled(outbox)
        with self._lock:
            if not said and self._is_claimed(room):
                return
            if claim is not None and self._claimed.get(room) is claim:
                del self._claimed[room]
            if said and room not in self._claimed and (outbox is None or not outbox.bound):
                self._remember(room, self._clock())
            if not said:
                self._events.forgotten(room)
            if outbox is not None and self._rooms.get(room) is outbox:
                self._drop(outbox)
        self._unpark(room)

    def check(self, room: int) -> None:
        """Called when SGLang polls: moves on chunks that were not complete, says again what may have been lost, and
        fails a request that stands still."""
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or outbox.ended:
                return
            now = self._clock()
            idle = now - outbox.progress
            again = outbox.repetition.due(now, outbox.progress)
            for each in outbox.destinations.values():
                each.again |= again and each.has_said
            told = outbox.told if again else None
        self._advance(outbox)
        if told is not None:
            self.counters.add("repeated")
            try:
                self._control(told)
            except HeteroError as error:
                logger.warning("%s: room %d: the first token was not told again: %s", self.manifest.label, room, error)
        if outbox.closed and outbox.stillness.too_long(now, idle, self._stall_seconds):
            waits = f"no progress for {idle:.0f} s, waiting for {outbox.waits_for()}"
            self.fail(room, f"{self.manifest.label}: {waits}")

    def _unpark(self, room: int | None = None) -> None:
        """Look again at what has waited: for a registration, the topology, or the end of its room's last use.

        room: only at what is about that one.
        """
        raise NotImplementedError

    # A mover.

    def _wake(self, destination: Destination) -> None:
        """Hand a destination that has something to write or to say to its mover; the lock is held."""
        mover = destination.peer.mover
        if mover is not None and destination.runnable and not destination.queued:
            destination.queued = True
            mover.wake(destination)

    def _turn(self, destination: Destination) -> bool:
        """On a mover's thread: one batch. True if there is more to do for the destination now."""
        problem, taken = "", None
        try:
            taken = self._take(destination)
            if taken is not None:
                problem = self._write(destination, *taken)
        except Exception as error:
            logger.exception("room %d to %s", destination.room, destination.peer.label)
            problem = f"has failed to send it: {type(error).__name__}: {error}"
            with self._lock:
                if destination.sending.in_flight:
                    destination.sending.write_failed(problem, in_doubt=taken is not None)
        with self._lock:
            outbox = self._rooms.get(destination.room)
            waits = outbox is None or outbox.moving
            destination.queued = runnable = not problem and not waits and destination.runnable
        if problem:
            try:
                self.fail(destination.room, f"{self.manifest.label} {problem}", of=destination)
            finally:
                if destination.unfinished is not None:
                    destination.unfinished.when_ended(partial(self._ended_late, destination, problem))
        elif destination.goodbye:
            self._farewell(destination)
        return runnable

    def _take(self, destination: Destination) -> tuple[list[tuple[int, Piece]], Held] | None:
        """The next batch, which may be empty, and where the request is. None: there is nothing to do now."""
        with self._lock:
            outbox = self._rooms.get(destination.room)
            if outbox is None or outbox.moving:
                return None
            budget = max(1, len(destination.units) // BATCHES_PER_WINDOW) * destination.area_bytes
            taken = destination.sending.take(min(destination.fitting(budget), fields.MAX_PIECES))
            if not (taken or destination.owes_total or destination.owes_repetition):
                return None
            batch = [(seq, destination.sequence[seq]) for seq in taken]
            return batch, Held(outbox.pages, outbox.slot, outbox.tokens, outbox.moves)

    def _write(self, destination: Destination, batch: Sequence[tuple[int, Piece]], source: Held) -> str:
        """Write a batch, which may be empty, and announce it; what went wrong, or an empty text."""
        if not batch and destination.owes_repetition:
            return self._say_again(destination, source)
        written = self._writer.write(destination, batch, source.pages, source.slot)
        with self._lock:
            if written.problem:
                if written.unfinished is None:
                    destination.sending.write_failed(written.problem, written.in_doubt)
                else:  # stays in flight until it is known how it ended
                    destination.sending.abort(written.problem)
                    destination.unfinished = written.unfinished
                return written.problem
            outbox = self._rooms.get(destination.room)
            if batch and outbox is not None:
                outbox.progress = self._clock()
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
        told = not (written.pieces or total >= 0) or self._announce(
            destination, source, written.pieces, written.digests, total
        )
        return "" if told else f"could not reach {destination.peer.label}"

    def _say_again(self, destination: Destination, source: Held) -> str:
        """Announce again what is written and not acknowledged; decode looks at what it does not know yet.

        A message is no progress: a destination that answers nothing is given up like before.
        """
        with self._lock:
            sending = destination.sending
            if sending.status is not SendingStatus.SENDING:
                return ""
            own = [(seq, destination.sequence[seq]) for seq in sending.announced][: fields.MAX_PIECES]
            told = sending.total if destination.total_told else None
        if destination.verify:
            pieces, digests = self._writer.digests_of(destination, own, source.pages, source.slot)
        else:
            pieces, digests = self._writer.announced(destination, own), ()
        with self._lock:
            outbox = self._rooms.get(destination.room)
            if outbox is not None and outbox.moves != source.moves:
                return ""  # the digests may be of somebody else's pages: another turn
            destination.again = False
        reads = told is not None and destination.program.pulls
        if reads and destination.verify:
            self._tell_reads(destination, source)
        self.counters.add("repeated")
        self._announce(destination, source, pieces, digests, -1 if told is None else told)
        return ""

    def _announce(
        self,
        destination: Destination,
        source: Held,
        pieces: tuple[messages.AnnouncedPiece, ...],
        digests: tuple[bytes, ...],
        total: int,
    ) -> bool:
        """Tell decode what lies in its units, and with it the number of pieces, -1 while that is not known."""
        reads = total >= 0 and destination.program.pulls
        return self._tell(
            destination.peer,
            messages.Ready,
            destination.room,
            destination.epoch,
            source=self._number,
            pieces=pieces,
            total=total,
            digests=digests,
            place=messages.place_of(source.pages, source.slot) if reads else "",
        )

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

    def _ended_late(self, destination: Destination, problem: str, settled: bool) -> None:
        """On an engine's thread: a write that was given up has ended. settled: nothing of it can arrive any more."""
        with self._lock:
            destination.sending.write_failed(problem, in_doubt=not settled)
        logger.info("room %d to %s: what was given up has ended", destination.room, destination.peer.label)
        self._farewell(destination)

    def _farewell(self, destination: Destination) -> None:
        """Tell the peer that nothing of the request will be written any more, once that is so."""
        with self._lock:
            destination.goodbye = destination.sending.in_flight
            drained = destination.sending.drained
            if drained:
                self._destinations.pop(destination.key, None)
        if drained:
            self._tell_drained(destination.peer, destination.room, destination.epoch)
