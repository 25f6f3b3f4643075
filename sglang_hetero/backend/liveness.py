"""Whether the prefill servers that a decode rank knows are still what they were, and alive.

What is concluded from what:

* the control service says that it is another process, or that ranks are others or missing: the server is asked anew
  before its next request; what its answer replaces is gone, and the requests under way there fail at once;
* the control service is silent, nobody listens on its port, nor on the bootstrap server's: the server has ended, and
  the requests under way there fail at once;
* silent, but somebody listens, or nothing comes back at all: it may only be stopped or cut off. Nothing is concluded;
  SGLang's own heartbeat and the time-outs end what waits for it. SGLang asks no server that has to be asked anew, which
  is not in its table; so if the bootstrap server of such a one does not answer us, it is given up as SGLang would;
* a rank refuses connections, where it takes messages and at its transfer engine, twice, some seconds apart, and nothing
  is heard of it meanwhile: that process has ended and writes no more, so that the units of staging that were kept
  because of it are free again. That is asked as long as there are any (doubts.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang_hetero.transfer.decode import DecodeSide
from sglang_hetero.transfer.engine.base import Engine
from sglang_hetero.transfer.engine.mooncake import refuses_connections
from sglang_hetero.transfer.link import Awaited
from sglang_hetero.transfer.messages import Pong
from sglang_hetero.transfer.worker import Worker

from .background import Background
from .doubts import Doubts
from .pairing import Path
from .peers import Host, Peers, Server

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two looks at what the control services have said."""
SILENT_SECONDS = 3.0
"""Three signs of life unanswered: now it is looked whether anybody listens on the control service's port."""
AGAIN_SECONDS, MAX_AGAIN_SECONDS = 1.0, 30.0
"""Between two questions to a server that is not well, at first; it doubles each time up to the second. A request for it
asks at once (Peers.ready)."""
UNANSWERED_SECONDS = 10.0
"""So long, and longer than one question, a bootstrap server has not answered when its server is given up; SGLang's
heartbeat gives it up after two misses, which takes as long."""


def news(server: Server, pong: Pong | None, pong_at: float) -> str:
    """What has changed at a server since its ranks were named, or an empty text. Pure."""
    if pong is None or pong_at <= server.since or not server.service:
        return ""
    if pong.incarnation != server.service:
        return "its control service was started again"
    told = dict(pong.topologies)
    for dp_rank, name in server.names.items():
        if told.get(dp_rank, "") != name:
            return f"ranks of its replica {dp_rank} {'were started again' if told.get(dp_rank) else 'are missing'}"
    return ""


class Liveness:
    """Looks after `peers` on a thread of its own, from construction to `close`; it never waits for a peer itself."""

    def __init__(
        self,
        peers: Peers,
        side: DecodeSide,
        engine: Engine,
        host: Host,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers, self._side, self._host, self._clock = peers, side, host, clock
        self._jobs = Background("hetero-liveness-ask")
        self._doubts = Doubts(side.manifest.label, side, engine, clock=clock)
        self._closing = threading.Event()
        self._said: set[str] = set()  # addresses of silent servers that the log knows of
        self._again: dict[str, tuple[float, float]] = {}  # by address: when it is asked again, and the pause after that
        self.worker = Worker("hetero-liveness", self._run)

    def close(self) -> None:
        """Stop looking; questions that are being asked end by themselves."""
        self.worker.stop()
        self._jobs.close()
        self._doubts.close()
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            try:
                self.look()
                self._side.remind()
                self._peers.pay()
            except Exception:
                logger.exception("%s: a look at the prefill servers", self._side.manifest.label)

    def look(self) -> None:
        """One look at everything. Asks on other threads, and does not wait for the answers."""
        troubled = {server.address for server in self._peers.servers() if self._is_troubled(server)}
        known = {server.address for server in self._peers.servers()}
        self._said &= troubled
        self._again = {address: when for address, when in self._again.items() if address in troubled}
        awaited = self._side.awaited()
        self._doubts.resolve({key: each for key, each in awaited.items() if _asked(each, known, troubled)})

    def _is_troubled(self, server: Server) -> bool:
        client = server.client
        if client is None:
            return False
        pong_at = client.pong_at
        changed = news(server, client.pong, pong_at)
        if changed and not server.outdated:
            logger.warning("prefill at %s: %s; it is asked anew", server.address, changed)
            self._peers.outdate(server.address, f"prefill at {server.address}: {changed}; try again")
        silent = client.ended or client.broken or client.silent_seconds > SILENT_SECONDS
        # One that was refused is asked anew by the next request for it, not before.
        again = bool(server.outdated) and server.decision.path is not Path.REFUSED
        if (changed or silent or again) and self._is_due(server.address):
            job = self._probe if silent else self._find
            self._jobs.submit(("ask", server.address), lambda: job(server))
        if server.outdated and server.silent_seconds >= UNANSWERED_SECONDS:
            why, rooms = f"has not answered for {server.silent_seconds:.0f} s", self._host.hetero_rooms(server.address)
            self._jobs.submit(("lost", server.address), lambda: self._lost(server, why, rooms))
        return bool(changed or silent or server.outdated)

    def _is_due(self, address: str) -> bool:
        now = self._clock()
        when, pause = self._again.get(address, (now, AGAIN_SECONDS))
        if now < when:
            return False
        self._again[address] = (now + pause, min(2 * pause, MAX_AGAIN_SECONDS))
        return True

    def _find(self, server: Server) -> None:
        # Those that come while it is asked may be for its successor, which is about to listen.
        rooms = self._host.hetero_rooms(server.address)
        error = self._peers.find(server.address)
        if error is not None and error.refused:
            self._lost(server, f"has ended: {error}", rooms)

    def _probe(self, server: Server) -> None:
        """Nothing is heard of its control service. Has it ended?"""
        client = server.client
        assert client is not None
        if not client.ended and not refuses_connections(client.address):
            if server.address not in self._said:
                self._said.add(server.address)
                logger.warning(
                    "prefill at %s has not answered for %.1f s; it may be stopped or cut off",
                    server.address,
                    client.silent_seconds,
                )
            if server.outdated:  # SGLang's heartbeat leaves it out
                self._find(server)
            return
        self._peers.outdate(server.address, f"prefill at {server.address} has no control service; try again")
        self._find(server)

    def _lost(self, server: Server, why: str, rooms: frozenset[int]) -> None:
        reason = f"prefill at {server.address} {why}"
        if self._peers.lose(server, reason):  # else another one has been found there meanwhile
            logger.warning("%s", reason)
            self._host.hetero_lost(server.address, reason, rooms)


def _asked(each: Awaited, known: set[str], troubled: set[str]) -> bool:
    """Whether it is worth asking if a process has ended: something is kept for it, or its server is not well."""
    return bool(each.units) or each.address in troubled or each.address not in known
