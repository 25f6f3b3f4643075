"""The prefill servers that a decode rank knows, and the control service that a prefill rank speaks through."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_hetero.errors import HeteroError, TransferRefused
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.layout.wire import encode as encode_manifest
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlClient
from sglang_hetero.transfer.link import Endpoint
from sglang_hetero.transfer.sources import SourceSet

from . import capability
from .pairing import Decision, Path

if TYPE_CHECKING:
    from sglang_hetero.transfer.decode import DecodeSide

logger = logging.getLogger(__name__)

TOPOLOGY_SECONDS = 0.5
"""How long the scheduler's thread waits for a control service; SGLang asks again if that is not enough."""
ASK_SECONDS = 1.0
"""Between a prefill rank's looks whether its server's bootstrap server is there."""


class Peers:
    """Thread-safe. By the address of a prefill server's bootstrap server."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._decisions: dict[str, Decision] = {}
        self._capable: set[str] = set()
        self._clients: dict[str, ControlClient] = {}
        self._ports: dict[str, int] = {}
        self._sources: dict[tuple[str, int], SourceSet] = {}
        self._own: ControlClient | None = None
        self._announced = threading.Event()

    # A decode rank.

    def decide(self, address: str, decision: Decision, *, capable: bool) -> None:
        """Requests of this server take this path from now on. capable: it understands our messages."""
        with self._lock:
            self._decisions[address] = decision
            self._capable.discard(address)
            if capable:
                self._capable.add(address)

    def capable(self, address: str) -> bool:
        """Whether a server understands our messages."""
        with self._lock:
            return address in self._capable

    def path(self, address: str) -> Path | None:
        """The path of a server's requests; None if it is not known."""
        with self._lock:
            decision = self._decisions.get(address)
        return None if decision is None else decision.path

    def refusal(self, address: str) -> str | None:
        """Why a server is refused; None if it is not."""
        with self._lock:
            decision = self._decisions.get(address)
        return decision.reason if decision is not None and decision.path is Path.REFUSED else None

    def join(self, address: str, control_port: int, dp_rank: int, side: DecodeSide) -> SourceSet | None:
        """The ranks of a replica, asked for now; None if they are not all there yet.

        Raises HeteroError if they and this rank do not go together. What was known of former processes is dropped.
        """
        client = self._client(address, control_port, side)
        try:
            topology = client.topology(TOPOLOGY_SECONDS, dp_rank)
        except HeteroError as error:
            logger.info("%s", error)
            return None
        with self._lock:
            known = self._sources.get((address, dp_rank))
        if known is not None and known.topology == topology.topology:
            return known
        made = side.join(address, topology)
        with self._lock:
            self._sources[address, dp_rank] = made
        if known is not None:
            now = {source.incarnation for source in made.sources}
            side.gone(frozenset(source.incarnation for source in known.sources) - now)
        return made

    def sources(self, address: str, dp_rank: int, side: DecodeSide) -> SourceSet:
        """The ranks of a replica. Raises HeteroError if they are not known or do not go together with this rank."""
        with self._lock:
            found, port = self._sources.get((address, dp_rank)), self._ports.get(address)
        if found is None and port is not None:
            found = self.join(address, port, dp_rank, side)
        if found is None:
            raise TransferRefused(f"the ranks of prefill replica {dp_rank} at {address} are not known yet; try again")
        return found

    def known(self, address: str) -> list[SourceSet]:
        """The replicas of a server that are known, also while it does not answer."""
        with self._lock:
            return [found for (server, _), found in self._sources.items() if server == address]

    def forget(self, address: str) -> None:
        """A server does not answer any more; what is known of its ranks stays, to be compared when it comes back."""
        with self._lock:
            self._decisions.pop(address, None)
            client = self._clients.pop(address, None)
            self._ports.pop(address, None)
        if client is not None:
            client.close()

    def _client(self, address: str, control_port: int, side: DecodeSide) -> ControlClient:
        with self._lock:
            client = self._clients.get(address)
            if client is not None and self._ports[address] == control_port and client.failure is None:
                return client
            if client is not None:
                client.close()
            host = address.rpartition(":")[0].strip("[]")
            client = ControlClient(
                host,
                control_port,
                identity=side.control_identity,
                incarnation=side.manifest.incarnation,
                on_message=lambda message: _to_decode(side, message),
            )
            self._clients[address], self._ports[address] = client, control_port
            return client

    # A prefill rank.

    def announce(
        self,
        address: str,
        manifest: Manifest,
        endpoint: Endpoint,
        session: str,
        topology: Callable[[messages.Topology], None],
    ) -> None:
        """Say who this rank is, and take the topology when all ranks have. Waits for its bootstrap server."""
        while (server := capability.offer(address)) is None:
            time.sleep(ASK_SECONDS)
        host = address.rpartition(":")[0].strip("[]")
        identity = messages.control_identity("prefill", endpoint.host, str(manifest.coordinates), manifest.incarnation)

        def take(message: messages.Message) -> None:
            if isinstance(message, messages.Topology) and message.dp_rank == manifest.coordinates.dp_rank:
                topology(message)

        own = ControlClient(
            host, server.control_port, identity=identity, incarnation=manifest.incarnation, on_message=take
        )
        with self._lock:
            self._own = own
        own.send(
            messages.Hello(
                incarnation=manifest.incarnation,
                manifest=encode_manifest(manifest),
                host=endpoint.host,
                port=endpoint.port,
                session=session,
            )
        )
        own.send(messages.TopologyRequest(incarnation=manifest.incarnation, dp_rank=manifest.coordinates.dp_rank))

    def send_first(self, message: messages.Message) -> None:
        """Send the first token's message. Raises HeteroError if there is no control service."""
        with self._lock:
            own = self._own
        if own is None:
            raise TransferRefused("this prefill rank has not reached its control service yet")
        own.send(message)


def _to_decode(side: DecodeSide, message: messages.Message) -> None:
    if isinstance(message, messages.FirstGeneration):
        side.handle(message)
