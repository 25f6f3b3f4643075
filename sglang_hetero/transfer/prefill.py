"""One prefill rank's side: what arrives from decode ranks, what the scheduler hands over, what goes out.

Three kinds of threads come here: the one that receives messages (`handle`), SGLang's scheduler (`send`, `fail`,
`release`, `check`), and one mover per decode rank (`_turn`). One lock guards the books; it is never held while bytes
move or a message is posted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sglang_hetero.errors import HeteroError, ProtocolError
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.layout.wire import decode as decode_manifest
from sglang_hetero.merge.assemble import Memory

from . import messages
from .counters import Counters
from .device import Done, Lane, at_once
from .engine.base import Engine
from .lifetime import Epochs, SendingStatus
from .link import Endpoint, Post
from .mover import Mover
from .outbox import Chunk, Destination, Ids, Outbox, Peer, destination_of
from .pieces import Piece
from .writer import PackBuffers, Writer

logger = logging.getLogger(__name__)

MAX_PARKED = 1024
"""Bind messages that wait for their sender's registration or for the topology: a matter of moments."""
MAX_ROOMS = 1 << 16
"""Room numbers whose last use is remembered: far more than requests can be under way."""
UNCLAIMED_SECONDS = 60.0
"""How long it is remembered that a request has failed for which prefill has not been asked yet."""
BATCHES_PER_WINDOW = 4
"""A window goes out in so many writes, so that decode merges one part of it while the next is on its way."""


class Events(Protocol):
    """What the process around learns about a request; called from any thread, without the lock."""

    def bound(self, room: int) -> None:
        """Every decode rank has told where the request goes."""

    def succeeded(self, room: int) -> None:
        """Every decode rank has everything: pages and slot may be freed."""

    def failed(self, room: int, reason: str) -> None:
        """It will not arrive; no new write of it begins."""


@dataclass(frozen=True)
class FirstToken:
    """What decode needs beside the caches to go on with a request: the token and the rows of SGLang's metadata."""

    token: int
    aux: tuple[bytes, ...]
    tokens: int
    """Length of the prompt."""


class PrefillSide:
    """The transfer at one prefill rank."""

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
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """control: sends to the control service. stall_seconds: without any progress a request fails."""
        self.manifest = manifest
        self.counters = counters or Counters()
        self._writer = Writer(engine, memory, packs, lane)
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
        self._claimed: set[int] = set()
        self._epochs = Epochs(keep=MAX_ROOMS)
        self._parked: OrderedDict[tuple[str, int, int], messages.Bind] = OrderedDict()

    # The thread that receives messages.

    def topology(self, topology: messages.Topology) -> None:
        """All ranks of this replica are known: now plans can be made. Raises HeteroError for what is no topology."""
        manifests = [decode_manifest(rank.manifest) for rank in topology.ranks]
        ordered = sorted(manifests, key=lambda source: (source.coordinates.pp_rank, source.coordinates.tp_rank))
        own = [number for number, source in enumerate(ordered) if source == self.manifest]
        if len(own) != 1:
            raise ProtocolError(f"{self.manifest.label}: the topology has this rank {len(own)} times")
        with self._lock:
            if topology.topology == self._topology:
                return
            self._topology, self._sources, self._number = topology.topology, tuple(ordered), own[0]
            for peer in self._peers.values():
                peer.plan = peer.side = None
                peer.programs.clear()
        self._unpark()

    def handle(self, message: messages.Message) -> None:
        """A message of a decode rank. What is wrong with it fails its request or is dropped, and is logged."""
        try:
            if isinstance(message, messages.Register):
                self._register(message)
            elif isinstance(message, messages.Bind):
                self._bind(message)
            elif isinstance(message, messages.Abort):
                self._abort(message)
            elif isinstance(message, (messages.Ack, messages.Finish)):
                self._progress(message)
            else:
                self.counters.add("dropped")
                logger.warning(
                    "%s: dropped a %s, which goes the other way", self.manifest.label, type(message).__name__
                )
        except HeteroError as error:
            self.counters.add("dropped")
            logger.warning("%s: dropped a %s: %s", self.manifest.label, type(message).__name__, error)

    def _register(self, message: messages.Register) -> None:
        manifest = decode_manifest(message.manifest)
        if manifest.incarnation != message.incarnation:
            raise ProtocolError("the manifest is of another incarnation than the message")
        peer = Peer(
            message.incarnation,
            manifest,
            Endpoint(message.host, message.port),
            message.session,
            message.arena,
            message.arena_bytes,
            message.control,
        )
        with self._lock:
            if message.incarnation in self._peers:
                return
            peer.mover = Mover(manifest.label, self._turn)
            self._peers[message.incarnation] = peer
            gone = [old for old in self._peers.values() if old.endpoint == peer.endpoint and old is not peer]
        logger.info("%s: %s registered, session %s", self.manifest.label, peer.label, peer.session)
        for old in gone:
            self._forget(old)
        self._unpark()

    def _unpark(self) -> None:
        """Look again at what has waited for a registration or the topology."""
        with self._lock:
            parked = list(self._parked.values())
            self._parked.clear()
        for message in parked:
            self.handle(message)

    def _forget(self, peer: Peer) -> None:
        """Another process has taken a peer's place."""
        with self._lock:
            self._peers.pop(peer.incarnation, None)
            rooms = {key[1] for key in self._destinations if key[0] == peer.incarnation}
        for room in rooms:
            self.fail(room, f"{peer.label} was started again")
        if peer.mover is not None:
            peer.mover.stop()

    def _bind(self, message: messages.Bind) -> None:
        key = (message.incarnation, message.room, message.epoch)
        with self._lock:
            peer = self._peers.get(message.incarnation)
            if peer is None or not self._sources:  # messages of two threads over there may overtake each other
                self._parked[key] = message
                while len(self._parked) > MAX_PARKED:
                    self._parked.popitem(last=False)
                return
            if not self._epochs.open(*key):
                return
            self._sweep()
        try:
            self._accept(message, peer)
        except HeteroError as error:
            self._tell(peer, messages.Failed, message.room, message.epoch, source=self._number, reason=str(error))
            self._tell(peer, messages.Drained, message.room, message.epoch, source=self._number)
            self.fail(message.room, str(error))

    def _accept(self, message: messages.Bind, peer: Peer) -> None:
        """Enter a destination. Raises HeteroError for what this rank would not do as decode expects."""
        with self._lock:
            destination = destination_of(message, peer, self._sources, self._number)
            outbox = self._rooms.get(message.room)
            again = outbox is not None and message.rank in outbox.destinations
        if again:
            self.fail(message.room, f"{peer.label} bound the request again")
        with self._lock:
            outbox = self._rooms.get(message.room)
            if outbox is None or again:
                outbox = self._rooms[message.room] = Outbox(message.room, message.ranks, progress=self._clock())
            if outbox.expected != message.ranks:
                raise ProtocolError(
                    f"{peer.label} says that {message.ranks} decode ranks take room {message.room}, another said "
                    f"{outbox.expected}"
                )
            outbox.destinations[message.rank] = destination
            self._destinations[message.incarnation, message.room, message.epoch] = destination
            outbox.extend(destination)
            self._wake(destination)
            bound = outbox.bound
        if bound:
            self._events.bound(message.room)

    def _progress(self, message: messages.Ack | messages.Finish) -> None:
        with self._lock:
            destination = self._destinations.get((message.incarnation, message.room, message.epoch))
            outbox = self._rooms.get(message.room)
            if destination is None or outbox is None or outbox.ended:
                return  # of a request that has ended here
            outbox.progress = self._clock()
            try:
                if isinstance(message, messages.Ack):
                    destination.sending.acked(message.upto)
                else:
                    destination.sending.finished()
            except ProtocolError as error:
                problem = str(error)
            else:
                problem = ""
                self._wake(destination)
            done = (
                all(each.sending.status is SendingStatus.FINISHED for each in outbox.destinations.values())
                and outbox.bound
            )
            if done:
                outbox.ended = True
        if problem:
            self.fail(message.room, problem)
        elif done:
            self.counters.add("requests")
            self._events.succeeded(message.room)

    def _abort(self, message: messages.Abort) -> None:
        key = (message.incarnation, message.room, message.epoch)
        with self._lock:
            self._parked.pop(key, None)
            self._epochs.end(*key)
            peer = self._peers.get(message.incarnation)
            destination = self._destinations.get(key)
        if destination is not None:
            self.fail(message.room, message.reason or f"{destination.peer.label} aborted", only=destination)
            self._farewell(destination)
        elif peer is not None:  # nothing of it was ever written, or all has been told already
            self._tell(peer, messages.Drained, message.room, message.epoch, source=self._number)

    # SGLang's scheduler.

    def claim(self, room: int) -> None:
        """SGLang has a sender for the request, which will `release` it."""
        with self._lock:
            self._claimed.add(room)

    def _sweep(self) -> None:
        """Drop what ended long ago and no sender has come for: the client has reached decode only. Lock is held."""
        now = self._clock()
        stale = [
            room
            for room, outbox in self._rooms.items()
            if outbox.ended and room not in self._claimed and now - outbox.progress > UNCLAIMED_SECONDS
        ]
        for room in stale:
            del self._rooms[room]

    def owns(self, room: int) -> bool:
        """Whether decode ranks have bound this request with us, so that it goes our way."""
        with self._lock:
            return room in self._rooms

    def send(
        self,
        room: int,
        *,
        first_page: int,
        pages: Ids,
        tokens: int,
        last: bool,
        slot: int = -1,
        first: FirstToken | None = None,
        ready: Done = at_once,
    ) -> None:
        """A chunk of the prompt has been computed, or enqueued: then `ready` tells when it is complete.

        pages: ids in this rank's pool that the chunk completes, from position `first_page` of the request on. tokens:
        how many of its tokens lie in them. slot: of the linear state, with the last chunk. first: with the last chunk
        at the one rank that speaks for its replica.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or outbox.ended or outbox.closed:
                return
            outbox.pages = np.concatenate([outbox.pages[:first_page], np.asarray(pages, dtype=np.int64)])
            outbox.slot = slot if last else outbox.slot
            outbox.chunks.append(Chunk(first_page, len(pages), tokens, last, ready))
            outbox.progress = self._clock()
            for destination in outbox.destinations.values():
                outbox.extend(destination)
                self._wake(destination)
            generation = self._first_generation(outbox, first) if first is not None else None
        if generation is not None:
            self._control(generation)

    def _first_generation(self, outbox: Outbox, first: FirstToken) -> messages.FirstGeneration:
        return messages.FirstGeneration(
            room=outbox.room,
            incarnation=self.manifest.incarnation,
            targets=tuple(messages.Target(each.peer.identity, each.epoch) for each in outbox.destinations.values()),
            token=first.token,
            topology=self._topology,
            tokens=first.tokens,
            slot=outbox.slot,
            pages=messages.pack_ids(outbox.pages),
            chunks=tuple(chunk.first_page + chunk.pages for chunk in outbox.chunks),
            aux=first.aux,
        )

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
            outbox.ended, outbox.reason = True, reason
            destinations = list(outbox.destinations.values())
            for destination in destinations:
                destination.sending.abort(reason)
        logger.warning("%s: room %d failed: %s", self.manifest.label, room, reason)
        self.counters.add("failures")
        for destination in destinations:
            if destination is not only:
                self._tell(
                    destination.peer, messages.Failed, room, destination.epoch, source=self._number, reason=reason
                )
            self._farewell(destination)
        self._events.failed(room, reason)

    def failure(self, room: int) -> str | None:
        """Why a request has failed on this side; None if it has not."""
        with self._lock:
            outbox = self._rooms.get(room)
            return outbox.reason if outbox is not None else None

    def release(self, room: int) -> None:
        """SGLang is done with the request; what is still on its way is cut off first."""
        self.fail(room, "the request ended on the prefill side")
        with self._lock:
            self._claimed.discard(room)
            outbox = self._rooms.pop(room, None)
            if outbox is None:
                return
            for destination in outbox.destinations.values():
                if not destination.sending.in_flight:
                    self._destinations.pop((destination.peer.incarnation, room, destination.epoch), None)

    def check(self, room: int) -> None:
        """Fail a request that stands still: called when SGLang polls, also moves on chunks that were not complete."""
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or outbox.ended:
                return
            for destination in outbox.destinations.values():
                outbox.extend(destination)
                self._wake(destination)
            idle = self._clock() - outbox.progress
            waits_for = [
                each.peer.label for each in outbox.destinations.values() if each.sending.status is SendingStatus.SENDING
            ]
        if outbox.closed and idle > self._stall_seconds:
            self.fail(room, f"no progress for {idle:.0f} s, waiting for {', '.join(waits_for)}")

    def close(self) -> None:
        """Stop the movers."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            if peer.mover is not None:
                peer.mover.stop()

    @property
    def state(self) -> dict[str, int]:
        """What is held at the moment, for tests and status pages."""
        with self._lock:
            return {
                "rooms": sum(not outbox.ended for outbox in self._rooms.values()),
                "in_flight": sum(each.sending.in_flight for each in self._destinations.values()),
                "peers": len(self._peers),
            }

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
            taken = destination.sending.take(max(1, len(destination.units) // BATCHES_PER_WINDOW))
            batch = [(seq, destination.sequence[seq]) for seq in taken]
            if outbox is None or not (batch or destination.owes_total):
                destination.queued = False
                return False
            destination.taken = max(destination.taken, taken.stop) if batch else destination.taken
            pages, slot = outbox.pages, outbox.slot
        problem = self._write(destination, batch, pages, slot)
        with self._lock:
            destination.queued = runnable = not problem and (destination.sending.runnable or destination.owes_total)
            if outbox is not None:
                outbox.progress = self._clock()
        if problem:
            self.fail(destination.room, problem)
        if destination.goodbye:
            self._farewell(destination)
        return runnable

    def _write(self, destination: Destination, batch: Sequence[tuple[int, Piece]], pages: Ids, slot: int) -> str:
        """Write a batch, which may be empty, and announce it; what went wrong, or an empty text."""
        written = self._writer.write(destination, batch, pages, slot)
        with self._lock:
            if written.problem:
                destination.sending.write_failed(written.problem, written.in_doubt)
                return written.problem
            if batch:
                destination.sending.wrote()
            if destination.sending.status is not SendingStatus.SENDING:
                return ""
            total = messages.Ready().total
            if destination.owes_total and destination.sending.total is not None:
                total, destination.total_told = destination.sending.total, True
        self.counters.add("writes")
        self.counters.add("descriptors", written.descriptors)
        self.counters.add("bytes", written.nbytes)
        if written.pieces or total >= 0:
            self._tell(
                destination.peer,
                messages.Ready,
                destination.room,
                destination.epoch,
                source=self._number,
                pieces=written.pieces,
                total=total,
                digests=written.digests,
            )
        return ""

    def _tell(self, peer: Peer, kind: Callable[..., messages.Message], room: int, epoch: int, **fields: Any) -> None:
        """Post to a decode rank; one that cannot be reached has its own timeout."""
        message = kind(room=room, epoch=epoch, incarnation=self.manifest.incarnation, **fields)
        try:
            self._post(peer.endpoint, messages.encode(message))
        except Exception as error:
            logger.warning("%s: no %s to %s: %s", self.manifest.label, type(message).__name__, peer.label, error)

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
