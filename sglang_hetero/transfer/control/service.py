"""The service: who is there, who asks, and the first token on its way. One thread has the socket."""

import logging
import threading
import time
import uuid
from types import TracebackType

import zmq
from msgspec.structs import replace

from sglang_hetero.errors import ControlError, HeteroError, MessageError

from .. import fields, messages
from ..messages import FirstGeneration, Hello, Message, Ping, Target, TopologyRequest
from . import common
from .parking import Parking
from .registry import Registry

log = logging.getLogger(__name__)

PARK_SECONDS = 60.0
"""How long a first token waits for a decode rank's connection; above any reconnection, below a client's patience."""
PARK_MESSAGES = 4096
PARK_BYTES = 64 << 20
SWEEP_MS = 1_000
"""How often what has been parked too long is looked for."""


class ControlService:
    """Serves from construction to `close`.

    host: address to listen on; the port is a free one. Whatever arrives is counted and dropped if it is not right
    (`counts`); the thread goes on. `failure` is the error that ended it nevertheless, else None. Sending never blocks:
    what a peer cannot take is parked or, where it would ask again, left. Raises ControlError if it cannot listen there.
    """

    def __init__(self, host: str, *, park_seconds: float = PARK_SECONDS) -> None:
        self.host = host
        self.failure: BaseException | None = None
        self._faults = common.Faults("control service", log)
        self._registry = Registry(uuid.uuid4().hex)
        self._parking = Parking(park_seconds, PARK_MESSAGES, PARK_BYTES)
        self._answers: dict[int, bytes] = {}  # encoded topologies, which many ranks ask for
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self.port = self._bind(host)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ControlError(f"the control service cannot listen on {host}: {error}") from None
        self._wake = common.Wake()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"hetero-control-{self.port}", daemon=True)
        self._thread.start()

    def _bind(self, host: str) -> int:
        common.prepare(self._socket, fields.MAX_MESSAGE_BYTES)
        # Tell apart who is not connected and who cannot take more, instead of dropping silently.
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        # A client that comes back has its identity at once, also while its former connection is not known to be dead.
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(common.endpoint(host, "*"))
        return int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def counts(self) -> dict[str, int]:
        """How often what went wrong, by kind."""
        return self._faults.counts

    def close(self) -> None:
        """Stop and free everything; may be called again. Takes at most CLOSE_SECONDS and LINGER_MS."""
        self._closing = True
        self._wake.set()
        self._thread.join(common.CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("control service on port %d does not end; its thread is left behind", self.port)

    def __enter__(self) -> "ControlService":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.failure = error
            log.critical("control service on port %d has ended: requests will fail", self.port, exc_info=True)
        finally:
            self._context.destroy(linger=common.LINGER_MS)
            self._wake.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._closing:
            poller.poll(SWEEP_MS)
            self._wake.clear()
            for _ in range(common.DRAIN):
                try:
                    frames = self._socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._receive(frames)
            expired = self._parking.expire(time.monotonic())
            if expired:
                self._faults.note("expired", f"{expired} messages for ranks that did not come back")

    def _receive(self, frames: list[bytes]) -> None:
        name = "message"
        try:
            if len(frames) != 2:
                raise MessageError(f"{len(frames)} frames, must be the sender's identity and a message")
            identity, payload = frames
            message = messages.decode(payload)
            name = type(message).__name__
            self._parking.deliver(identity, lambda parked: self._send(identity, parked))
            self._handle(identity, message)
        except HeteroError as error:
            self._faults.note(f"bad {name}", error)
        except Exception as error:
            self._faults.note(f"{type(error).__name__} at {name}", error, traceback=True)

    def _handle(self, identity: bytes, message: Message) -> None:
        match message:
            case Ping():
                pass  # what was parked has been delivered
            case TopologyRequest():
                if not self._send(identity, self._answer(message.dp_rank)):
                    self._faults.note("unanswered", f"{_shown(identity)} cannot take a Topology, and will ask again")
            case Hello():
                self._hello(identity, message)
            case FirstGeneration():
                self._relay(identity, message)
            case _:
                raise MessageError(f"{_shown(identity)} sent it to the control service, where it has no business")

    def _hello(self, identity: bytes, hello: Hello) -> None:
        manifest, changed = self._registry.accept(hello, identity)
        dp_rank = manifest.coordinates.dp_rank
        if changed:
            self._answers.pop(dp_rank, None)
        topology = self._registry.topology(dp_rank)
        log.info("%s reported: %s", manifest.label, topology.reason or f"topology {topology.topology} is complete")
        if topology.ready:
            for each in self._registry.identities(dp_rank) if changed else [identity]:
                self._send_or_park(each, self._answer(dp_rank))

    def _answer(self, dp_rank: int) -> bytes:
        if dp_rank not in self._answers:
            self._answers[dp_rank] = messages.encode(self._registry.topology(dp_rank))
        return self._answers[dp_rank]

    def _relay(self, identity: bytes, first: FirstGeneration) -> None:
        if not self._registry.knows(identity, first.incarnation):
            raise MessageError(f"{_shown(identity)} has not reported as a prefill rank, or has been replaced")
        for target in first.targets:
            own = replace(first, epoch=target.epoch, targets=(Target(*target),))
            self._send_or_park(target.identity, messages.encode(own))

    def _send_or_park(self, identity: bytes, payload: bytes) -> None:
        # Behind what is parked already: the newest topology must be the last to arrive.
        if identity in self._parking or not self._send(identity, payload):
            dropped = self._parking.add(identity, payload, time.monotonic())
            if dropped:
                self._faults.note("crowded out", f"{dropped} parked messages, by one for {_shown(identity)}")

    def _send(self, identity: bytes, payload: bytes) -> bool:
        """False if the peer is not connected or cannot take more now."""
        try:
            self._socket.send_multipart([identity, payload], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


def _shown(identity: bytes) -> str:
    return messages.printable(identity.decode("ascii", "replace"), 80)
