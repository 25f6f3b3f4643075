"""The service: who is there, who asks, and the first token on its way. One thread has the socket."""

import logging
import threading
import time
import uuid
from types import TracebackType

import zmq
from msgspec.structs import replace

from sglang_hetero.errors import ControlError, HeteroError, MessageError, SealError

from .. import fields, messages
from ..faults import Faults
from ..messages import FirstGeneration, Hello, Message, Ping, Pong, Target, TopologyRequest
from ..seal import Purpose, Seal
from . import common
from .parking import Parking
from .registry import Registry

log = logging.getLogger(__name__)

PARK_SECONDS = 60.0
"""How long a first token waits for a decode rank's connection; above any reconnection, below a client's patience."""
PARK_MESSAGES = 4096
PARK_BYTES = 64 << 20
SWEEP_MS = 1_000
"""How often what has been parked too long is looked for, and prefill ranks whose connection is broken."""


class ControlService:
    """Serves from construction to `close`.

    host: address to listen on; the port is a free one. Whatever arrives is counted and dropped if it is not right
    (`counts`); the thread goes on. `failure` is the error that ended it nevertheless, else None. Sending never blocks:
    what a peer cannot take is parked or, where it would ask again, left. Raises ControlError if it cannot listen there.
    """

    def __init__(self, host: str, *, seal: Seal | None = None, park_seconds: float = PARK_SECONDS) -> None:
        self.host = host
        self._seal = seal or Seal()
        self.failure: BaseException | None = None
        self._faults = Faults("control service", log)
        self._incarnation = uuid.uuid4().hex
        self._registry = Registry(self._incarnation)
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

    @property
    def ranks(self) -> int:
        """Prefill ranks that have reported."""
        return len(self._registry)

    @property
    def parked(self) -> int:
        """Messages that wait for a connection."""
        return len(self._parking)

    @property
    def fault(self) -> str:
        """That the thread has ended although nobody has closed it, and why; else an empty text."""
        if self._closing or (self.failure is None and self._thread.is_alive()):
            return ""
        return f"the control service on port {self.port} has ended, requests fail: {self.failure}"

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
        intake = common.Intake(self._socket, self._faults)
        sweep = time.monotonic()
        while not self._closing:
            poller.poll(0 if intake else SWEEP_MS)
            self._wake.clear()
            for frames in intake.take():
                self._receive(frames)
            now = time.monotonic()
            if now >= sweep:
                sweep = now + SWEEP_MS / 1000
                try:
                    self._sweep(now)
                except Exception as error:
                    self._faults.note(f"{type(error).__name__} at the sweep", error, traceback=True)

    def _sweep(self, now: float) -> None:
        expired = self._parking.expire(now)
        if expired:
            self._faults.note("expired", f"{expired} messages for ranks that did not come back")
        for identity in self._registry.connected():
            # Only sending tells that a connection is broken: the process has ended, or has confirmed nothing for
            # SILENCE_SECONDS. Then decode must not be told that the replica is complete.
            if self._deliver(identity, self._pong(True)) == zmq.EHOSTUNREACH:
                log.warning("the connection to %s is broken", self._registry.left(identity))
                self._answers.clear()

    def _receive(self, frames: list[bytes]) -> None:
        name = "message"
        try:
            if len(frames) != 2:
                raise MessageError(f"{len(frames)} frames, must be the sender's identity and a message")
            identity, sealed = frames
            # The identity is what a connection calls itself; the seal is of who has it.
            message = messages.decode(self._seal.open(sealed, Purpose.TO_SERVICE, identity))
            name = type(message).__name__
            if self._registry.back(identity):
                log.info("the connection to %s is there again", _shown(identity))
                self._answers.clear()
            self._parking.deliver(identity, lambda parked: self._send(identity, parked))
            self._handle(identity, message)
        except SealError as error:
            self._faults.note("unsealed", error)
        except HeteroError as error:
            self._faults.note(f"bad {name}", error)
        except Exception as error:
            self._faults.note(f"{type(error).__name__} at {name}", error, traceback=True)

    def _handle(self, identity: bytes, message: Message) -> None:
        match message:
            case Ping():  # what was parked has been delivered
                self._send(identity, self._pong(self._registry.knows(identity, message.incarnation)))
            case TopologyRequest():
                if not self._send(identity, self._answer(message.dp_rank)):
                    self._faults.note("unanswered", f"{_shown(identity)} cannot take a Topology, and will ask again")
            case Hello():
                self._hello(identity, message)
            case FirstGeneration():
                self._relay(identity, message)
            case _:
                raise MessageError(f"{_shown(identity)} sent it to the control service, where it has no business")

    def _pong(self, known: bool) -> bytes:
        return messages.encode(Pong(incarnation=self._incarnation, known=known, topologies=self._registry.names()))

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
        return not self._deliver(identity, payload)

    def _deliver(self, identity: bytes, payload: bytes) -> int:
        """0, or EHOSTUNREACH: the peer is not connected, or EAGAIN: it cannot take more now."""
        try:
            sealed = self._seal.seal(payload, Purpose.FROM_SERVICE, identity)
            self._socket.send_multipart([identity, sealed], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return int(error.errno)
            raise
        return 0


def _shown(identity: bytes) -> str:
    return messages.printable(identity.decode("ascii", "replace"), 80)
