"""The prefill servers that a decode rank knows: which path their requests take, who their ranks are, how to reach them.

A server is asked on a thread of ours (`find`), never on SGLang's scheduler thread, where a server that does not answer
would hold up the requests of all others. What was found stays until the server is forgotten, or has to be asked anew
because something has changed there (liveness.py).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from sglang_hetero.errors import ControlError, HeteroError, PeerAway, TransferRefused
from sglang_hetero.layout.wire import decode as decode_manifest
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlClient
from sglang_hetero.transfer.decode import DecodeSide
from sglang_hetero.transfer.engine.base import Engine
from sglang_hetero.transfer.link import Addressee, Endpoint
from sglang_hetero.transfer.seal import Seal
from sglang_hetero.transfer.sources import SourceSet

from . import capability
from .background import Background
from .capability import PrefillServer
from .doubts import has_let_go
from .owed import Owed
from .pairing import Decision, Path

logger = logging.getLogger(__name__)

TOPOLOGY_SECONDS = 2.0
"""How long a control service is waited for when its server is asked; SGLang asks again if that is not enough."""
GRACE_SECONDS = 0.05
"""How long the scheduler's thread waits for a server that is asked for the first time while no other one is. A server
that is well answers within it; else the request waits until SGLang asks again, a second later."""
MAX_ASKED = 64
"""Servers that wait to be asked. Who may name a bootstrap address in a request could name any number of them."""
ASKING_THREADS = 4
MAX_SERVERS = 128
"""Servers that are known at a time, the latest used: each has a connection, two threads of ZeroMQ's and one of ours."""
MAX_PROBLEMS = 256
"""Addresses of which it is known why nothing is known of them."""
OWED_SECONDS = 300.0
"""How long prefill waits for a request that decode does not ask for: SGLang's bootstrap timeout, unless it was set."""


class Host(Protocol):
    """SGLang's tables, which its manager keeps. Called on threads of ours."""

    def hetero_decide(self, server: PrefillServer, sources: Mapping[int, SourceSet]) -> Decision:
        """The path of a server's requests; sources: its ranks by attention-DP replica, if our path is offered.
        Raises HeteroError if the two sides do not go together."""

    def hetero_adopt(self, server: PrefillServer, decision: Decision) -> None:
        """Let SGLang begin requests of this server."""

    def hetero_drop(self, address: str) -> None:
        """Let SGLang begin no request of this server before it has been found anew."""

    def hetero_rooms(self, address: str) -> frozenset[int]:
        """The requests of this server that there are now."""

    def hetero_lost(self, address: str, reason: str, rooms: frozenset[int] | None = None) -> None:
        """The server has ended: its requests fail. rooms: only these of them."""

    def hetero_give_up(self, room: int, ranks: Sequence[Addressee], reason: str, *, ours: bool) -> None:
        """Tell prefill ranks that a request will not be bound. ours: whether they take our messages."""


@dataclass
class Server:
    """A prefill server, as it was when it was last asked."""

    found: PrefillServer
    decision: Decision
    client: ControlClient | None = None
    control_port: int = 0
    service: str = ""
    """Incarnation of its control service."""
    sources: Mapping[int, SourceSet] = field(default_factory=dict)
    """Its ranks, by attention-DP replica."""
    ranks: Mapping[int, tuple[Addressee, ...]] = field(default_factory=dict)
    """Where they take messages, as far as that is known; also of a server that is refused."""
    incarnations: frozenset[str] = frozenset()
    """Of the processes of its ranks."""
    sessions: frozenset[str] = frozenset()
    """Of their transfer engines."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of the replicas' topologies."""
    since: float = field(default_factory=time.monotonic)
    """When its ranks were named, time.monotonic()."""
    adopted: bool = False
    """Whether SGLang has been told of it."""
    outdated: str = ""
    """Why it has to be asked anew before it gets another request, or an empty text."""
    silent_since: float | None = None
    """When its bootstrap server first gave no answer, time.monotonic(), and none since; None if the last one came."""
    silent_seconds: float = 0.0
    """For how long it had given none when it was last asked."""

    @property
    def address(self) -> str:
        return self.found.address


class Peers:
    """By the address of a prefill server's bootstrap server. Everything may be called from any thread."""

    def __init__(
        self, host: Host, seal: Seal, *, jobs: Background | None = None, owed_seconds: float = OWED_SECONDS
    ) -> None:
        """seal: of this process. owed_seconds: how long prefill waits for decode to ask for a request."""
        self.side: DecodeSide | None = None
        self.engine: Engine | None = None
        """Both are set when they are there, before SGLang begins requests; None if this rank cannot take our path."""
        self._host, self._seal = host, seal
        self._changed = threading.Condition(threading.RLock())
        self._servers: OrderedDict[str, Server] = OrderedDict()
        self._problems: OrderedDict[str, str] = OrderedDict()
        self._asked: set[str] = set()
        """Addresses that are being asked, or wait for that."""
        self._owed = Owed(owed_seconds)
        self._questions = itertools.count()
        self._jobs = jobs or Background("hetero-ask", threads=ASKING_THREADS, waiting=MAX_ASKED)

    # SGLang's scheduler.

    def ready(self, address: str) -> bool:
        """Whether requests of a server may begin. If not it is asked, and SGLang asks here again."""
        with self._changed:
            if self._current(address) is not None:
                self._servers.move_to_end(address)
                return True
            idle = not self._asked
        self._begin(address)
        with self._changed:
            if idle:
                self._changed.wait_for(lambda: address not in self._asked, GRACE_SECONDS)
            return self._current(address) is not None

    def _begin(self, address: str) -> None:
        """Let a server be asked soon, on a thread of ours, unless it is being asked."""
        with self._changed:
            if address in self._asked:
                return
            self._asked.add(address)
            number = next(self._questions)  # the job before it, for the same address, may not have returned yet
        if not self._jobs.submit((address, number), lambda: self._ask(address)):
            with self._changed:
                self._asked.discard(address)
            self._trouble(address, f"{MAX_ASKED} other prefill servers wait to be asked; try again")

    def missed(self, address: str) -> None:
        """SGLang does not know a server that is ready: it has dropped it while it was found. It is asked anew."""
        with self._changed:
            server = self._current(address)
            if server is not None and server.adopted:
                server.outdated = f"prefill at {address} has been dropped meanwhile; try again"

    def problem(self, address: str) -> str:
        """Why requests of a server cannot begin, as far as that is known; else an empty text."""
        with self._changed:
            server = self._servers.get(address)
            return self._problems.get(address, "") or (server.outdated if server is not None else "")

    def path(self, address: str) -> Path | None:
        """The path of a server's requests; None if it has to be asked first."""
        with self._changed:
            server = self._current(address)
            return None if server is None else server.decision.path

    def refusal(self, address: str) -> str | None:
        """Why a server is refused; None if it is not. The next request asks it anew, since servers are restarted."""
        with self._changed:
            server = self._servers.get(address)
            if server is None or server.decision.path is not Path.REFUSED:
                return None
        self.outdate(address, server.decision.reason)
        return server.decision.reason

    def listens(self, address: str) -> bool:
        """Whether a server's ranks take our messages."""
        with self._changed:
            server = self._servers.get(address)
            return server is not None and server.found.listens

    def ranks(self, address: str, dp_rank: int) -> tuple[Addressee, ...]:
        """Where the ranks of a replica take messages, as far as that is known.

        Not of a server that has to be asked anew: others may be there. One that is refused is, after each request.
        """
        with self._changed:
            server = self._servers.get(address)
            if server is None or (server.outdated and server.decision.path is not Path.REFUSED):
                return ()
            return server.ranks.get(dp_rank, ())

    def sources(self, address: str, dp_rank: int) -> SourceSet:
        """The ranks of a replica. Raises TransferRefused if there is no such replica, or it has to be asked first."""
        with self._changed:
            server = self._current(address)
            found = None if server is None else server.sources.get(dp_rank)
        if server is None:
            raise TransferRefused(self.problem(address) or f"prefill at {address} has to be asked first; try again")
        if found is None:
            raise TransferRefused(
                f"prefill at {address} has {len(server.sources)} attention-DP replicas, the request is for number "
                f"{dp_rank}"
            )
        return found

    def owe(self, address: str, room: int, reason: str) -> None:
        """A request is given up whose prefill ranks wait for it, and it is not known where: they are told when it is.

        All replicas are: which one has the request may not be known either.
        """
        with self._changed:
            self._owed.add(address, room, reason)
            server = self._current(address)
        if server is not None and any(server.ranks.values()):
            self._pay(server)
        else:
            self._begin(address)

    def begins(self, address: str, room: int) -> None:
        """A request begins: what is owed because of a former one with its room would end it."""
        with self._changed:
            self._owed.drop(address, room)

    # Any thread.

    def pay(self) -> None:
        """Ask a server that something is owed to, if nothing else is to be asked. To be called now and then."""
        with self._changed:
            address = None if self._asked else self._owed.due()
        if address is not None:
            self._begin(address)

    def _pay(self, server: Server) -> None:
        """Tell a server's ranks of the requests that were given up before it was known where they are."""
        address = server.address
        with self._changed:
            if not self._owed.of(address):
                return
        everywhere = server.ranks
        try:
            if not any(everywhere.values()):
                everywhere = capability.ranks(address, server.found.info)
        except (HeteroError, msgspec.MsgspecError) as error:
            logger.info("ranks of prefill at %s cannot be told yet what was given up: %s", address, error)
            return
        ranks = [rank for each in everywhere.values() for rank in each]
        if not ranks:
            return
        with self._changed:
            owed = self._owed.take(address)
        for room, reason in owed.items():
            try:
                self._host.hetero_give_up(room, ranks, reason, ours=server.found.listens)
            except Exception as error:
                logger.warning("room %d: prefill at %s was not told: %s", room, address, error)

    def servers(self) -> list[Server]:
        """All that are known, those that have to be asked anew included."""
        with self._changed:
            return list(self._servers.values())

    def decide(self, address: str, decision: Decision) -> None:
        """Requests of a server that is known take this path after all."""
        with self._changed:
            server = self._servers.get(address)
            if server is not None:
                server.decision = decision

    def outdate(self, address: str, why: str) -> None:
        """A server has to be asked anew before it gets another request."""
        with self._changed:
            server = self._servers.get(address)
            if server is not None:
                server.outdated = why
        self._host.hetero_drop(address)

    def forget(self, address: str, *, problem: str = "") -> None:
        """A server has ended or does not answer any more. problem: why its requests cannot begin."""
        with self._changed:
            server = self._remove(address)
        if problem:
            self._trouble(address, problem)
        if server is not None and server.client is not None:
            server.client.close()

    def lose(self, server: Server, problem: str) -> bool:
        """As `forget`, if this is still what is known at its address; else nothing happens, and it returns False."""
        with self._changed:
            if self._servers.get(server.address) is not server:
                return False
            self._remove(server.address)
        self._trouble(server.address, problem)
        if server.client is not None:
            server.client.close()
        return True

    def _remove(self, address: str) -> Server | None:
        """The lock is held. Its client is to be closed without it."""
        server = self._servers.pop(address, None)
        if server is not None and server.client is not None:
            server.client.end()  # now: who is about to enter a server with it must see that
        return server

    def find(self, address: str) -> PeerAway | None:
        """Ask a server who it is, and decide about its requests, unless that is being done. Takes seconds.

        Returns what kept it from answering, or None.
        """
        with self._changed:
            if address in self._asked:
                return None
            self._asked.add(address)
        return self._ask(address)

    def _ask(self, address: str) -> PeerAway | None:
        try:
            self._find(address)
        except PeerAway as error:
            self._trouble(address, str(error))
            self._unanswered(address, error)
            logger.info("%s", error)
            return error
        except Exception as error:
            logger.exception("prefill at %s", address)
            self.forget(address, problem=f"prefill at {address}: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._asked.discard(address)
                self._changed.notify_all()
        return None

    def _unanswered(self, address: str, error: PeerAway) -> None:
        with self._changed:
            server = self._servers.get(address)
            if server is None:
                return
            if not error.unanswered:
                server.silent_since, server.silent_seconds = None, 0.0
                return
            now = time.monotonic()
            server.silent_since = now if server.silent_since is None else server.silent_since
            server.silent_seconds = now - server.silent_since

    def close(self) -> None:
        """Ask nobody any more, and end the connections."""
        self._jobs.close()
        for server in self.servers():
            self.forget(server.address)

    def _current(self, address: str) -> Server | None:
        server = self._servers.get(address)
        return server if server is not None and not server.outdated else None

    def _trouble(self, address: str, text: str) -> None:
        with self._changed:
            self._problems[address] = text
            self._problems.move_to_end(address)
            while len(self._problems) > MAX_PROBLEMS:
                self._problems.popitem(last=False)

    def _find(self, address: str) -> None:
        found = capability.ask(address, self._seal)
        server = Server(found, Decision(Path.REFUSED, found.problem))
        if not found.problem:
            try:
                self._join(server)
                server.decision = self._host.hetero_decide(found, server.sources)
            except PeerAway:
                self._pay(server)  # its bootstrap server has answered, and knows where the ranks are
                raise
            except HeteroError as error:
                server.decision = Decision(Path.REFUSED, str(error))
            except Exception as error:
                logger.exception("prefill at %s", address)
                reason = f"prefill at {address}: {type(error).__name__}: {error}"
                server.decision = Decision(Path.REFUSED, reason)
        if server.decision.path is Path.REFUSED and not server.ranks:
            try:
                server.ranks = capability.ranks(address, found.info)
            except (HeteroError, msgspec.MsgspecError) as error:
                logger.info("ranks of prefill at %s cannot be told that it is refused: %s", address, error)
        logger.info("%s: %s", address, server.decision.reason)
        self._enter(server)
        self._host.hetero_adopt(found, server.decision)
        with self._changed:
            server.adopted = True
            over = bool(server.outdated) or self._servers.get(address) is not server
        if over:  # since it was entered: SGLang's table was cleared of it before it was put there
            self._host.hetero_drop(address)
        self._pay(server)
        self._replaced(server)

    def _enter(self, server: Server) -> None:
        """From now on this is what is known of the server. Raises PeerAway if it has been given up meanwhile."""
        evicted: list[Server | None] = []
        busy = {each.address for each in self.side.awaited().values()} if self.side is not None else set()
        with self._changed:
            former = self._servers.pop(server.address, None)
            over = server.client is not None and server.client.ended
            if not over:
                self._servers[server.address] = server
            self._problems.pop(server.address, None)
            while len(self._servers) > MAX_SERVERS:
                idle = [address for address in self._servers if address not in busy and address != server.address]
                oldest = idle[0] if idle else next(iter(self._servers))
                evicted.append(self._remove(oldest))
        if former is not None and former.client is not None and former.client is not server.client:
            former.client.close()
        for each in evicted:
            assert each is not None
            self._host.hetero_drop(each.address)
            if each.client is not None:
                each.client.close()
        if over:
            self._host.hetero_drop(server.address)
            raise PeerAway(f"prefill at {server.address} was given up while it was asked; try again")

    def _join(self, server: Server) -> None:
        """Learn who its ranks are, if our path is offered and this rank can take it.

        Raises PeerAway if they are not all there yet, HeteroError if they and this rank do not go together.
        """
        side, offer, address = self.side, server.found.capability, server.address
        if side is None or offer is None or not server.found.capable or offer.unsupported:
            return
        with self._changed:
            known = self._servers.get(address)
        client = server.client = self._client(address, offer.control_port, side)
        server.control_port = offer.control_port
        try:
            topologies = [client.topology(TOPOLOGY_SECONDS, dp_rank) for dp_rank in range(server.found.info.dp_size)]
        except HeteroError as error:
            if known is None or known.client is not client:
                client.close()
            raise PeerAway(f"prefill at {address}: {error}") from None
        server.since = time.monotonic()
        server.service = topologies[0].incarnation
        server.ranks = {each.dp_rank: tuple(map(_addressee, each.ranks)) for each in topologies}
        server.names = {each.dp_rank: each.topology for each in topologies}
        server.incarnations = frozenset(rank.incarnation for each in server.ranks.values() for rank in each)
        server.sessions = frozenset(rank.session for each in topologies for rank in each.ranks)
        old = {} if known is None else known.sources
        server.sources = {
            each.dp_rank: old[each.dp_rank]
            if each.dp_rank in old and old[each.dp_rank].topology == each.topology
            else side.join(address, each)
            for each in topologies
        }

    def _replaced(self, server: Server) -> None:
        """All ranks at this address are known: those that were there before take no part any more.

        Have their processes ended? They may only stand still: the address may lead to another host now, or a process
        was stopped and forgotten. So each is asked. What cannot be told now is asked again (doubts.py).
        """
        side, engine = self.side, self.engine
        if side is None or engine is None or not server.incarnations:
            return
        former = {
            incarnation: each
            for incarnation, each in side.awaited().items()
            if each.address == server.address and incarnation not in server.incarnations
        }
        if not former:
            return
        why = f"was started again (prefill at {server.address})"
        side.lost(frozenset(former), why)
        endpoints = {rank.endpoint for replica in server.ranks.values() for rank in replica}
        ended = frozenset(
            incarnation
            for incarnation, each in former.items()
            if has_let_go(engine, each, sessions=server.sessions, endpoints=endpoints)
        )
        side.gone(ended, why)

    def _client(self, address: str, control_port: int, side: DecodeSide) -> ControlClient:
        """The connection to the control service there."""
        with self._changed:
            known = self._servers.get(address)
        client = None if known is None or known.control_port != control_port else known.client
        if client is not None and not client.ended:
            return client
        host = address.rpartition(":")[0].strip("[]")
        try:
            return ControlClient(
                host,
                control_port,
                identity=side.control_identity,
                incarnation=side.manifest.incarnation,
                on_message=lambda message: _to_decode(side, message),
                # It breaks at once when the process ends; another one may be at its place before anybody has looked.
                on_broken=lambda: self.outdate(address, f"prefill at {address}: the connection is broken; try again"),
                seal=self._seal,
            )
        except ControlError as error:
            raise PeerAway(str(error)) from None


def _addressee(rank: messages.RankEntry) -> Addressee:
    return Addressee(Endpoint(rank.host, rank.port), decode_manifest(rank.manifest).incarnation)


def _to_decode(side: DecodeSide, message: messages.Message) -> None:
    if isinstance(message, messages.FirstGeneration):
        side.handle(message)
