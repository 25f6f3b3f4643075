"""A prefill rank's word with its own server: who it is, or why it cannot take part; and the first tokens that it tells.

Who it is is said again whenever the control service has forgotten it, because it was started again; why it cannot take
part is said every few seconds, because the bootstrap server forgets that by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sglang_hetero.errors import ControlError, HeteroError, PeerAway, TransferRefused
from sglang_hetero.transfer import messages
from sglang_hetero.transfer.control import ControlClient
from sglang_hetero.transfer.seal import Seal
from sglang_hetero.transfer.worker import Worker

from . import capability
from .bootstrap import REFUSAL_SECONDS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Between two looks whether the service still knows this rank, and the first pause after a failure."""
MAX_PAUSE_SECONDS = 10.0
"""Failures make the pause longer, up to this."""
SILENT_SECONDS = 5.0
"""Without a word from the service it is asked for its port again: a new one may be there."""


class Announcer:
    """Serves from construction to `close`, on a thread of its own. Everything may be called from any thread."""

    def __init__(
        self,
        address: str,
        seal: Seal,
        *,
        hello: messages.Hello | None = None,
        dp_rank: int = 0,
        identity: bytes = b"",
        topology: Callable[[messages.Topology], None] | None = None,
        refusal: str = "",
    ) -> None:
        """address: of the rank's own bootstrap server. Either `refusal`: why the rank cannot take part; or the others:
        its report, its attention-DP replica, its identity, and who takes the replica's topology."""
        self._address, self._seal = address, seal
        self._hello, self._dp_rank, self._identity, self._topology = hello, dp_rank, identity, topology
        self._refusal = refusal
        self._lock = threading.Lock()
        self._client: ControlClient | None = None
        self._port = 0
        self._answered: messages.Pong | None = None
        self._taken = ""  # name of the topology that was taken last
        self._closing = threading.Event()
        self._said = ""
        self.worker = Worker("hetero-announce", self._run)

    def send_first(self, message: messages.Message) -> None:
        """Send the first token's message. Raises HeteroError if there is no control service."""
        client = None
        while True:
            with self._lock:
                former, client = client, self._client
            if client is None:
                raise TransferRefused(f"this prefill rank has not reached its control service yet{self._because}")
            try:
                client.send(message)
                return
            except ControlError:
                # It may have been closed since, because another one has taken its place.
                if client is former:
                    raise

    @property
    def fault(self) -> str:
        """What has ended that must not have, or an empty text."""
        return self.worker.fault

    def close(self) -> None:
        """Stop, and end the connection."""
        self.worker.stop()
        self._closing.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _because(self) -> str:
        return f": {self._said}" if self._said else ""

    def _run(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self.look()
            except Exception as error:
                text = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
                pause = min(max(2 * pause, LOOK_SECONDS), MAX_PAUSE_SECONDS)
                if text != self._said:  # once, however often it is tried
                    self._said = text
                    level = logging.INFO if isinstance(error, PeerAway) else logging.ERROR
                    logger.log(level, "this rank cannot announce itself at %s yet: %s", self._address, text)
                    if not isinstance(error, HeteroError):
                        logger.exception("announcing at %s", self._address)
            else:
                self._said = ""
                pause = REFUSAL_SECONDS if self._refusal else LOOK_SECONDS

    def look(self) -> None:
        """See to it that the server knows this rank. Raises HeteroError where that is not possible now."""
        if self._refusal:
            capability.refuse(self._address, self._refusal, self._seal)
            return
        client = self._client
        if client is None or client.failure is not None or client.silent_seconds > SILENT_SECONDS:
            client = self._connect()
        pong = client.pong
        if pong is None or pong is self._answered:
            return
        self._answered = pong
        if not pong.known:
            self._report(client)
        elif dict(pong.topologies).get(self._dp_rank, "") not in ("", self._taken):
            self._ask(client)

    def _connect(self) -> ControlClient:
        """A connection to the control service that the bootstrap server names now."""
        assert self._hello is not None
        port = capability.offer(self._address, self._seal).control_port
        old = self._client
        if old is not None and old.failure is None and port == self._port:
            return old  # stopped or cut off: it connects by itself when the service is there again
        if not port:
            raise TransferRefused(f"the bootstrap server at {self._address} has no control service (SGLANG_HETERO=off)")
        client = ControlClient(
            self._address.rpartition(":")[0].strip("[]"),
            port,
            identity=self._identity,
            incarnation=self._hello.incarnation,
            on_message=self._take,
            seal=self._seal,
        )
        with self._lock:
            if self._closing.is_set():
                client.close()
                raise TransferRefused("this rank is closing")
            self._client, self._port = client, port
        if old is not None:
            old.close()
        self._report(client)
        return client

    def _report(self, client: ControlClient) -> None:
        assert self._hello is not None
        client.send(self._hello)
        self._ask(client)

    def _ask(self, client: ControlClient) -> None:
        assert self._hello is not None
        client.send(messages.TopologyRequest(incarnation=self._hello.incarnation, dp_rank=self._dp_rank))

    def _take(self, message: messages.Message) -> None:
        if isinstance(message, messages.Topology) and message.dp_rank == self._dp_rank and self._topology is not None:
            self._topology(message)
            self._taken = message.topology
