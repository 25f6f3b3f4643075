"""A rank's connection to the control service. One thread has the socket; others hand messages over through a queue."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import zmq

from sglang_hetero.errors import ControlError, MessageError, SealError

from .. import fields, messages
from ..faults import Faults
from ..messages import FirstGeneration, Message, Ping, Pong, Topology, TopologyRequest
from ..seal import Purpose, Seal
from . import common

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""Between two signs of life: so long a first token that was parked over a break of the connection has to wait, and so
long it takes to hear of a rank that was started again."""
MAX_UNSENT = 4096
"""Messages that wait here while the service is away; then `send` raises."""
FIRST_ASK_SECONDS = 0.25
LAST_ASK_SECONDS = 4.0
"""A topology is asked for again after the first, then after twice as long each time, up to the second: a service that
was away for long must not find a pile of questions."""


class ControlClient:
    """Connected from construction to `close`; reconnects by itself.

    identity: of `messages.control_identity`. incarnation: of this process. on_message: called in the client's thread
    with each FirstGeneration and each ready Topology; it must not wait for the service (so not call `topology`), and
    what it raises is counted and logged. `failure` is the error that ended the thread, else None. `pong`: the newest
    answer to a sign of life, None before the first; `pong_at`: when it came, time.monotonic(). on_broken: called in
    the client's thread when the connection breaks, as it does at once when the service's process ends; `broken` until
    something comes again. `ended`: nothing comes or goes any more, for ever.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        identity: bytes,
        incarnation: str,
        on_message: Callable[[Message], None],
        on_broken: Callable[[], None] = lambda: None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        seal: Seal | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        self.failure: BaseException | None = None
        self.pong: Pong | None = None
        self.pong_at = 0.0
        self.broken = False
        self._heard_at = time.monotonic()
        self._identity, self._seal = identity, seal or Seal()
        self._on_broken = on_broken
        self._incarnation, self._on_message, self._heartbeat = incarnation, on_message, heartbeat_seconds
        self._faults = Faults(f"client of the control service at {self.address}", log)
        self._unsent: deque[bytes] = deque()
        self._condition = threading.Condition()
        # By dp_rank, of those that were asked for: how many answers, and the newest.
        self._heard: dict[int, tuple[int, Topology | None]] = {}
        self._ping = messages.encode(Ping(incarnation=incarnation))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            common.prepare(self._socket, fields.MAX_TOPOLOGY_BYTES)
            self._socket.set(zmq.ROUTING_ID, identity)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(common.endpoint(host, port))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ControlError(f"no connection to a control service at {self.address} is possible: {error}") from None
        self._wake = common.Wake()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"hetero-control-client-{port}", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """How often what went wrong, by kind."""
        return self._faults.counts

    @property
    def silent_seconds(self) -> float:
        """For how long nothing has come from the service; without a first word, since the construction."""
        return time.monotonic() - self._heard_at

    def send(self, message: Message) -> None:
        """Hand a message over for sending; never blocks. Raises MessageError for one that cannot be sent, ControlError
        if the client has ended or the service has been away for so long that MAX_UNSENT wait."""
        payload = messages.encode(message)
        with self._condition:
            self._check_running()
            if len(self._unsent) >= MAX_UNSENT:
                raise ControlError(
                    f"{len(self._unsent)} messages wait for the control service at {self.address}; "
                    "is prefill's server up and its host reachable?"
                )
            self._unsent.append(payload)
        self._wake.set()

    def topology(self, timeout: float, dp_rank: int = 0) -> Topology:
        """All ranks of a prefill replica, asked for now. Blocks at most `timeout` seconds, then raises ControlError."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("topology() in the client's own thread would wait for itself")
        deadline, pause = time.monotonic() + timeout, FIRST_ASK_SECONDS
        with self._condition:
            before, _ = self._heard.setdefault(dp_rank, (0, None))
        while True:
            self.send(TopologyRequest(incarnation=self._incarnation, dp_rank=dp_rank))
            with self._condition:
                self._condition.wait_for(
                    lambda: self.ended or self._ready(dp_rank, before), min(pause, deadline - time.monotonic())
                )
                self._check_running()
                if found := self._ready(dp_rank, before):
                    return found
                count, newest = self._heard.get(dp_rank, (0, None))
            if time.monotonic() >= deadline:
                why = newest.reason if newest and count > before else "it does not answer"
                raise ControlError(
                    f"the control service at {self.address} has not named the ranks of prefill replica {dp_rank} "
                    f"within {timeout:g} s: {why}"
                )
            pause = min(2 * pause, LAST_ASK_SECONDS)

    def _ready(self, dp_rank: int, before: int) -> Topology | None:
        """A topology heard since the answer number `before`. The condition is held."""
        count, newest = self._heard.get(dp_rank, (0, None))
        return newest if newest and newest.ready and count > before else None

    @property
    def ended(self) -> bool:
        """Whether it is closed or has failed: such a client is of no use again."""
        return self._closing or self.failure is not None

    def _check_running(self) -> None:
        if self.ended:
            why = f"has failed: {self.failure}" if self.failure else "is closed"
            raise ControlError(f"the client of the control service at {self.address} {why}")

    def end(self) -> None:
        """Begin to close, and wait for nothing: it has `ended` from now on. `close` waits until all is freed."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._wake.set()

    def close(self) -> None:
        """Send what waits if that can be done at once, stop, free everything; may be called again.
        Takes at most CLOSE_SECONDS and LINGER_MS."""
        self.end()
        if threading.current_thread() is self._thread:
            return  # from the callback: the thread ends after it
        self._thread.join(common.CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("client of the control service at %s does not end; its thread is left behind", self.address)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread

    def _run(self) -> None:
        try:
            self._loop()
            self._flush()
        except BaseException as error:
            log.critical("client of the control service at %s has ended", self.address, exc_info=True)
            with self._condition:
                self.failure = error
                self._condition.notify_all()
        finally:
            self._context.destroy(linger=common.LINGER_MS)
            self._wake.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        intake = common.Intake(self._socket, self._faults)
        beat = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            if now >= beat:
                beat = now + self._heartbeat
                if not self._unsent:  # whatever else is sent is a sign of life as well
                    self._unsent.append(self._ping)
            self._flush()
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))
            poller.poll(0 if intake else max(0, math.ceil((beat - now) * 1000)))
            self._wake.clear()
            for frames in intake.take():
                self._receive(frames)
            self._look_at_connection()

    def _look_at_connection(self) -> None:
        broken = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart(zmq.DONTWAIT)
            broken = True
        if not broken:
            return
        # What comes from now on comes over a new connection.
        self.broken = True
        try:
            self._on_broken()
        except Exception as error:
            self._faults.note(f"{type(error).__name__} at a break", error, traceback=True)

    def _flush(self) -> None:
        """Send until the connection takes no more. Only this thread takes from the queue."""
        while self._unsent:
            try:
                self._socket.send(self._seal.seal(self._unsent[0], Purpose.TO_SERVICE, self._identity), zmq.DONTWAIT)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _receive(self, frames: list[bytes]) -> None:
        name = "message"
        try:
            if len(frames) != 1:
                raise MessageError(f"{len(frames)} frames, must be one")
            payload = self._seal.open(frames[0], Purpose.FROM_SERVICE, self._identity)
            message = messages.decode(payload, limit=fields.MAX_TOPOLOGY_BYTES)
            name = type(message).__name__
            self._heard_at, self.broken = time.monotonic(), False
            if isinstance(message, Pong):
                self.pong = message
                self.pong_at = self._heard_at  # behind it: who reads this first has an answer that is as new or newer
            elif isinstance(message, Topology):
                with self._condition:
                    if message.dp_rank in self._heard:
                        self._heard[message.dp_rank] = (self._heard[message.dp_rank][0] + 1, message)
                        self._condition.notify_all()
                if message.ready:
                    self._on_message(message)
            elif isinstance(message, FirstGeneration):
                self._on_message(message)
            else:
                raise MessageError("the control service has no business sending it")
        except SealError as error:
            self._faults.note("unsealed", error)
        except MessageError as error:
            self._faults.note(f"bad {name}", error)
        except Exception as error:
            self._faults.note(f"{type(error).__name__} at {name}", error, traceback=True)
