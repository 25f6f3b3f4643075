"""One prefill rank's side: what arrives from decode ranks, what the scheduler hands over, what goes out.

Threads that come here: those that receive messages (`handle`, `topology`), SGLang's scheduler (`send`, `fail`,
`release`, `check`), the follower of forward passes (`reached`, `locate`), those that look who is still there
(`awaited`, `gone`) and how the rank is (`state`, `check_integrity`), and, in dispatch.py, one mover per decode rank.
"""

from __future__ import annotations

import logging

import numpy as np

from sglang_hetero.device import Done, at_once
from sglang_hetero.errors import HeteroError, ProtocolError
from sglang_hetero.layout.wire import decode as decode_manifest

from . import integrity, messages
from .dispatch import MAX_FORMER, MAX_OPEN, MAX_PARKED, MAX_PEERS, Dispatch, Former, Parked
from .lifetime import SendingStatus
from .link import Awaited, Endpoint
from .mover import Mover
from .outbox import Chunk, FirstToken, Ids, Move, Outbox, Peer, Placed, destination_of
from .pieces import Mark

logger = logging.getLogger(__name__)

ROOMS = "requests that are under way at a time need rooms of their own (bootstrap_room)"
"""What to do where two requests have one room."""
STILL_SECONDS = 5.0
"""Without any progress of a request it is looked whether its decode ranks have ended."""


class PrefillSide(Dispatch):
    """The transfer at one prefill rank."""

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
        """A message of a decode rank. What is wrong with it fails its request, or is dropped and counted."""
        self._handle(message)

    def _handle(self, message: messages.Message, parked: Parked | None = None) -> None:
        """parked: where it has waited; nobody has said it just now."""
        acked = 0 if parked is None else parked.acked
        try:
            if parked is None:
                self._hear(message.incarnation)
            if isinstance(message, (messages.Register, messages.Bind, messages.Abort)):
                self._check_addressee(message)
            if isinstance(message, messages.Register):
                self._register(message)
            elif isinstance(message, messages.Bind):
                self._bind(message, acked)
            elif isinstance(message, messages.Abort):
                self._abort(message)
            elif isinstance(message, (messages.Ack, messages.Finish)):
                self._progress(message)
            else:
                raise ProtocolError("it goes the other way")
        except HeteroError as error:
            self.counters.add("dropped")
            self._faults.note(f"dropped a {type(message).__name__}", error)

    def _check_addressee(self, message: messages.Register | messages.Bind | messages.Abort) -> None:
        """Raises ProtocolError if it is for another process, whose endpoint this one has now."""
        if message.source and message.source != self.manifest.incarnation:
            raise ProtocolError(f"it is for {message.source}, which this process has replaced")

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
            if message.incarnation in self._former:
                raise ProtocolError("another process has taken its place")
            if message.incarnation in self._peers:
                return
            gone = self._enter(peer)
        logger.info("%s: %s registered, session %s", self.manifest.label, peer.label, peer.session)
        for old in gone:
            self._forget(old)
        self._unpark()

    def _enter(self, peer: Peer) -> list[Peer]:
        """Know a decode rank from now on. Whom it displaces has to be forgotten as soon as the lock is free.

        The lock is held. Raises ProtocolError if there are too many.
        """
        gone = [old for old in self._peers.values() if old.place == peer.place] or self._crowded_out()
        peer.mover = Mover(peer.label, self._turn, self._device, yields=self._busy_waits)
        peer.heard = self._clock()
        self._peers[peer.incarnation] = peer
        return gone

    def _hear(self, incarnation: str) -> None:
        """A process has said something, so it lives: know it again, if it was forgotten and no other has its place.

        It may have been taken for dead wrongly, and its Abort has to be answered. Raises ProtocolError if there are too
        many.
        """
        with self._lock:
            known = self._peers.get(incarnation)
            if known is not None:
                known.heard = self._clock()
            former = self._former.get(incarnation)
            if former is None or former.undrained is None:
                return
            peer = former.peer
            if any(other.place == peer.place for other in self._peers.values()):
                return
            gone = self._enter(peer)
            del self._former[incarnation]
            # It is told that nothing is under way to it any more only when that is so.
            self._destinations.update({each.key: each for each in former.undrained if not each.sending.drained})
        logger.warning("%s: %s lives and is known again", self.manifest.label, peer.label)
        for old in gone:
            self._forget(old)
        self._unpark()

    def _crowded_out(self) -> list[Peer]:
        """Whom a new decode rank displaces, if there are too many; the lock is held. Raises ProtocolError if nobody."""
        if len(self._peers) < MAX_PEERS:
            return []
        busy = {incarnation for incarnation, _, _ in self._destinations}
        for peer in self._peers.values():  # who registered first may well be gone
            if peer.incarnation not in busy:
                return [peer]
        raise ProtocolError(f"{MAX_PEERS} decode ranks are known, and all have requests under way")

    def _unpark(self, room: int | None = None) -> None:
        with self._lock:
            waiting = [key for key in self._parked if room is None or key[1] == room]
            parked = [self._parked.pop(key) for key in waiting]
        for each in parked:
            self._handle(each.message, each)

    def awaited(self) -> dict[str, Awaited]:
        """The decode processes that requests stand still for, by incarnation; no I/O."""
        with self._lock:
            now, found = self._clock(), {}
            for each in self._destinations.values():
                outbox = self._rooms.get(each.room)
                still = outbox is None or now - outbox.progress > STILL_SECONDS
                if still and each.sending.status is not SendingStatus.FINISHED:
                    peer = each.peer
                    found[peer.incarnation] = Awaited(
                        peer.label, str(peer.endpoint), peer.session, peer.endpoint, heard=peer.heard
                    )
            return found

    def gone(self, incarnations: frozenset[str], why: str) -> None:
        """These decode processes are no more: their requests have failed. why: continues the name of one."""
        with self._lock:
            peers = [self._peers[each] for each in incarnations if each in self._peers]
        for peer in peers:
            self._forget(peer, why)

    def _forget(self, peer: Peer, why: str = "was started again") -> None:
        """Another process has taken a peer's place, or it has ended."""
        with self._lock:
            if self._peers.get(peer.incarnation) is not peer:
                return  # another thread has
            del self._peers[peer.incarnation]
            former = self._former[peer.incarnation] = Former(peer)
            while len(self._former) > MAX_FORMER:
                self._former.popitem(last=False)
            for key in [key for key in self._parked if key[0] == peer.incarnation]:
                del self._parked[key]
            keys = [key for key in self._destinations if key[0] == peer.incarnation]
            destinations = [self._destinations.pop(key) for key in keys]
        for destination in destinations:
            self.fail(destination.room, f"{peer.label} {why}", of=destination)
        if peer.mover is not None:
            peer.mover.stop()
        with self._lock:
            peer.plan = peer.side = None
            peer.programs.clear()
            former.undrained = tuple(each for each in destinations if not each.sending.drained)
            for each in destinations:
                each.sequence = []  # what is being written has been taken from it; it is as long as the prompt

    def _bind(self, message: messages.Bind, acked: int) -> None:
        key = (message.incarnation, message.room, message.epoch)
        self._sweep()
        with self._lock:
            if message.incarnation in self._former:
                raise ProtocolError(f"room {message.room} is bound by a process that another one has replaced")
            peer = self._peers.get(message.incarnation)
            late = peer is not None and self._epochs.late(*key)
            outbox = self._rooms.get(message.room)
            again = (
                outbox is not None
                and bool(outbox.destinations)
                and (message.rank in outbox.destinations or outbox.use != message.use)
            )
        if peer is not None and late:
            self._answer_late(message, peer)
            return
        if again and peer is not None:
            self.fail(message.room, f"{peer.label} bound the room again, for another request; {ROOMS}")
        with self._lock:
            let_go = peer is not None and message.room in self._let_go and self._epochs.open(*key)
        if peer is not None and let_go:
            self._refuse(message, peer, f"the request had ended at {self.manifest.label} before it was bound")
            return
        with self._lock:
            peer = self._peers.get(message.incarnation)  # another thread may have let the rank in, or the same Bind
            if peer is not None and self._epochs.late(*key):
                return
            if peer is None or not self._sources or self._in_use(message):
                self._park(key, message, acked)
                return
            self._epochs.open(*key)
        try:
            self._accept(message, peer, acked)
        except HeteroError as error:
            with self._lock:
                self._end_unbound(message.room, str(error))
            self.fail(message.room, str(error))
            with self._lock:
                entered = key in self._destinations
            if not entered:  # else it is told when nothing of it is under way
                self._refuse(message, peer, str(error))

    def _end_unbound(self, room: int, reason: str) -> None:
        """The request may be waiting here for a Bind that will not come, or not come again; the lock is held."""
        if room not in self._rooms and room not in self._let_go and len(self._rooms) < MAX_OPEN:
            self._rooms[room] = Outbox(room, 0, progress=self._clock(), ended=True, reason=reason)

    def _refuse(self, message: messages.Bind, peer: Peer, reason: str) -> None:
        """A request will not be sent, and nothing of it ever was."""
        self._tell_failed(peer, message.room, message.epoch, reason)
        self._tell_drained(peer, message.room, message.epoch)

    def _answer_late(self, message: messages.Bind, peer: Peer) -> None:
        """A Bind of a request that was bound before, or ended: said again, or its Abort has overtaken it.

        If it is no longer sent decode has not heard so: that message was lost, or could not be sent before decode had
        registered.
        """
        with self._lock:
            destination = self._destinations.get((message.incarnation, message.room, message.epoch))
            outbox = self._rooms.get(message.room)
            last = outbox.destinations.get(message.rank) if outbox is not None else None
            last = last if last is not None and (last.peer, last.epoch) == (peer, message.epoch) else destination
            reason = last.sending.reason if last is not None else None
            drained = destination is None or (reason is not None and destination.sending.drained)
        if reason is not None:
            self._tell_failed(peer, message.room, message.epoch, reason)
        if drained:
            self._tell_drained(peer, message.room, message.epoch)

    def _in_use(self, message: messages.Bind) -> bool:
        """Whether an earlier use of the room is not over here; the lock is held.

        It is over when SGLang has let go of it. What has only been given up by others before anything was bound, and is
        waited for by nobody, does not count.
        """
        outbox = self._rooms.get(message.room)
        if outbox is None or (not outbox.ended and message.rank not in outbox.destinations):
            return False
        if not outbox.destinations and not self._is_claimed(message.room):
            del self._rooms[message.room]
            return False
        return True

    def _park(self, key: tuple[str, int, int], message: messages.Bind, acked: int) -> None:
        """Keep it until it can be looked at; the lock is held."""
        before = self._parked.get(key)
        self._parked[key] = Parked(message, acked if before is None else max(acked, before.acked))
        while len(self._parked) > MAX_PARKED:
            self._parked.popitem(last=False)

    def _accept(self, message: messages.Bind, peer: Peer, acked: int) -> None:
        """Enter a destination. Raises HeteroError for what this rank would not do as decode expects."""
        with self._lock:
            destination = destination_of(message, peer, self._sources, self._number)
        record = self.perf.sent(message.room)
        with self._lock:
            outbox = self._rooms.get(message.room)
            if outbox is None:
                if len(self._rooms) >= MAX_OPEN:
                    raise ProtocolError(
                        f"{self.manifest.label} has {MAX_OPEN} requests already; send it fewer at a time"
                    )
                outbox = self._rooms[message.room] = Outbox(
                    message.room,
                    message.ranks,
                    message.use,
                    self._claimed.get(message.room) if self._is_claimed(message.room) else None,
                    progress=self._clock(),
                    perf=record,
                )
            if outbox.ended:  # by another thread, since it was looked whether the room is in use
                raise ProtocolError(outbox.reason or f"the request has ended at {self.manifest.label}")
            if self._peers.get(peer.incarnation) is not peer:  # the same
                raise ProtocolError(f"another process has taken the place of {peer.label}")
            if outbox.expected != message.ranks:
                raise ProtocolError(
                    f"{peer.label} says that {message.ranks} decode ranks take room {message.room}, another said "
                    f"{outbox.expected}; {ROOMS}"
                )
            outbox.destinations[message.rank] = destination
            destination.perf = outbox.perf
            self._destinations[destination.key] = destination
            parked = self._parked.pop(destination.key, None)  # repeated while this one waited
            destination.sending.acked(acked if parked is None else max(acked, parked.acked))
            outbox.progress = self._clock()
            outbox.extend(destination)
            self._wake(destination)
            bound = outbox.bound
        if bound:
            outbox.perf.bound()
            self._events.bound(message.room)

    def _progress(self, message: messages.Ack | messages.Finish) -> None:
        key = (message.incarnation, message.room, message.epoch)
        with self._lock:
            parked = self._parked.get(key)
            if parked is not None and isinstance(message, messages.Ack):
                parked.acked = max(message.upto, parked.acked)
                return
            destination = self._destinations.get(key)
            outbox = self._rooms.get(message.room)
            if destination is None or outbox is None or outbox.ended:
                if outbox is not None and outbox.ended and isinstance(message, messages.Finish):
                    outbox.left(message.incarnation, message.epoch)
                return  # of a request that has ended here
            before = destination.sending.news
            try:
                if isinstance(message, messages.Finish):
                    destination.sending.finished()
                    destination.left = True
                elif message.stage == self.manifest.coordinates.pp_rank:
                    destination.sending.acked(message.upto)
                else:
                    raise ProtocolError(f"pieces of stage {message.stage} are acknowledged to {self.manifest.label}")
            except ProtocolError as error:
                problem = str(error)
            else:
                problem = ""
                self._wake(destination)
            if destination.sending.news != before:  # a repetition does not keep alive what stands still
                outbox.progress = self._clock()
            done = not problem and outbox.finished and self._settle(outbox, None)
        if problem:
            self.fail(message.room, problem)
        elif done:
            self._settled(outbox)

    def _abort(self, message: messages.Abort) -> None:
        key = (message.incarnation, message.room, message.epoch)
        reason = message.reason or "decode has given the request up without a reason; see its log"
        self._sweep()
        with self._lock:
            self._parked.pop(key, None)
            peer = self._peers.get(message.incarnation)
            if peer is not None:
                reason = messages.attributed(peer.label, reason)
            destination = self._destinations.get(key)
            never_bound = self._epochs.open(*key)
            outbox = self._rooms.get(message.room)
            if outbox is not None:
                outbox.left(message.incarnation, message.epoch)
            if never_bound:
                self._end_unbound(message.room, reason)
            same_use = peer is not None and outbox is not None and outbox.use == message.use
        if destination is not None:
            self.fail(message.room, reason, of=destination, asked=True)
            return
        if never_bound and same_use:
            self.fail(message.room, reason)
        if peer is not None:  # nothing of it was ever written, or all has been told already
            self._tell_drained(peer, message.room, message.epoch)

    # SGLang's scheduler.

    def owns(self, room: int) -> bool:
        """Whether decode ranks have bound this request with us, so that it goes our way."""
        with self._lock:
            return room in self._rooms

    def begin(self, room: int, *, end: int, last: bool, placed: Placed) -> Chunk | None:
        """The model is about to compute a request's prompt up to token `end`: its pieces may go layer by layer.

        Tell how far it has come with `reached`, when `placed` is ready. None: at the end of the chunk then, as ever.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or outbox.ended or not outbox.bound:
                return None
            outbox.progress = self._clock()
            chunk = outbox.begin(end, self.manifest.page_size, placed, last=last)
        if chunk is not None:
            outbox.perf.forward_began(chunk.tokens)
        return chunk

    def computed(self, room: int, *, last: bool) -> None:
        """The forward pass of a chunk that was begun is over, the draft model's included. For the figures only."""
        with self._lock:
            outbox = self._rooms.get(room)
        if outbox is not None:
            outbox.perf.forward_ended(last)

    def reached(self, room: int, chunk: Chunk, mark: Mark) -> None:
        """The model has come so far with a chunk that was begun: what is before may be sent."""
        try:
            with self._lock:
                outbox = self._rooms.get(room)
                if outbox is None or outbox.ended or not outbox.reach(chunk, mark):
                    return
                outbox.progress = self._clock()
        except HeteroError as error:
            self.fail(room, f"{self.manifest.label}: {error}")
            return
        self._advance(outbox)

    def move(self, room: int) -> Move | None:
        """SGLang may move the request to other pages now; `locate` has to say where it is. None: it need not."""
        with self._lock:
            outbox = self._rooms.get(room)
            return outbox.move() if outbox is not None and not outbox.ended else None

    def locate(self, room: int, move: Move, placed: Placed) -> None:
        """Where the request is after a move. placed: ready; its ids are of all pages that the move tells."""
        first = None
        try:
            with self._lock:
                outbox = self._rooms.get(room)
                if outbox is None or outbox.ended or not outbox.locate(move, placed):
                    return
                first, outbox.first = outbox.first, None
        except HeteroError as error:
            self.fail(room, f"{self.manifest.label}: {error}")
            return
        self._advance(outbox)
        if first is not None:
            self._tell_first(outbox, first)

    def follows(self, room: int) -> bool:
        """Whether a request's chunks may be begun: every decode rank has said where it goes."""
        with self._lock:
            outbox = self._rooms.get(room)
            return outbox is not None and outbox.bound and not outbox.ended

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

        What has not gone before goes now. What is wrong with it fails the request.

        pages: ids in this rank's pool that the chunk completes, from position `first_page` of the request on. tokens:
        how many of its tokens lie in them. slot: of the linear state, with the last chunk. first: with the last chunk
        at the one rank that speaks for its replica.
        """
        with self._lock:
            outbox = self._rooms.get(room)
            if outbox is None or outbox.ended or outbox.closed:
                return
            chunk = Chunk(first_page, len(pages), tokens, last, ready)
            outbox.progress = self._clock()
            try:
                outbox.hand_over(chunk, np.asarray(pages, dtype=np.int64), slot)
                problem = ""
            except HeteroError as error:
                problem = f"{self.manifest.label}: {error}"
        if problem:
            self.fail(room, problem)
            return
        outbox.perf.handed_over(last, tokens)
        self._advance(outbox)
        if first is None:
            return
        with self._lock:
            if outbox.moving:
                outbox.first = first  # the message says where the request is
                return
        self._tell_first(outbox, first)

    def _tell_first(self, outbox: Outbox, first: FirstToken) -> None:
        try:
            with self._lock:
                if outbox.ended:
                    return
                message = outbox.told = self._first_generation(outbox, first)
            self._control(message)
        except HeteroError as error:
            self.fail(outbox.room, f"{self.manifest.label} could not tell the first token: {error}")

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
            chunks=tuple(chunk.end_page for chunk in outbox.chunks),
            aux=first.aux,
        )

    def close(self) -> None:
        """Stop the movers."""
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            if peer.mover is not None:
                peer.mover.stop()

    def check_integrity(self) -> list[str]:
        """Where the books do not agree, and which threads have ended; empty if all is right. No I/O."""
        with self._lock:
            wrong = integrity.sending(self._peers, self._rooms, self._destinations)
            movers = [peer.mover for peer in self._peers.values() if peer.mover is not None]
        return [*wrong, *(fault for mover in movers if (fault := mover.worker.fault))]

    @property
    def state(self) -> dict[str, int]:
        """What is held at the moment, for tests and status pages."""
        with self._lock:
            return {
                "rooms": sum(not outbox.ended for outbox in self._rooms.values()),
                "in_flight": sum(each.sending.in_flight for each in self._destinations.values()),
                "peers": len(self._peers),
            }
