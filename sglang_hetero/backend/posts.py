"""Messages of ours to other ranks, over sockets of our own, so that a rank that is lost holds nobody up.

They go to the sockets at which SGLang's ranks receive (PULL). SGLang's own sender is not used for that: its socket does
not connect again after a connection that was refused or timed out, and blocks its thread for 30 s once 1,000 messages
wait there, while requests of all other servers stand still.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from sglang_hetero.errors import PeerAway
from sglang_hetero.transfer.control.common import endpoint as address_of
from sglang_hetero.transfer.control.common import prepare
from sglang_hetero.transfer.dispatch import MAX_PEERS
from sglang_hetero.transfer.fields import MAX_MESSAGE_BYTES
from sglang_hetero.transfer.link import Endpoint
from sglang_hetero.transfer.messages import printable

MAX_ENDPOINTS = MAX_PEERS
"""Ranks that there is a socket for, the latest used: as many as a prefill rank knows."""
MAX_WAITING = 4096
"""Messages that wait for a rank, while its connection is made (again) or it takes none; of a few hundred bytes each. A
stream of batches makes some hundred in a second, so this is a stall of several seconds; and what a request whose end
is not there says again, one message in 16 s, makes as many in the 11 minutes of 100 such requests."""
IDLE_SECONDS = 60.0
"""A socket that nothing was sent by for so long is closed: of ranks that are no more it would connect for ever. Several
times the longest pause between two repetitions."""
MAX_SHOWN = 80
"""Characters of a name in an error."""
CONNECT_MS = 3000
"""For one try to connect. The system's own goes on for two minutes, with pauses that grow to one."""
AGAIN_MS, MAX_AGAIN_MS = 100, 2000
"""Between two tries to connect, at first; it doubles each time up to the second."""


@dataclass
class _Line:
    """The socket to one rank. used: when it was last sent by."""

    socket: zmq.Socket[bytes]
    used: float


class Posts:
    """Sends to ranks, in the order of posting as far as one rank is concerned. From any thread; none ever waits.

    What was taken arrives once or never: what a broken connection had taken over is lost. When a rank's queue is full a
    new socket takes its place: what the old one still held is lost, but for what the rank's host has already, which may
    then be read after what is posted next. Those who hear us bear that (lifetime/, epochs and repetition).
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * MAX_ENDPOINTS)  # those that are just being closed count, too
        # ZeroMQ's sockets are not thread-safe. Nothing that is done with the lock held waits.
        self._lock = threading.Lock()
        self._lines: OrderedDict[Endpoint, _Line] = OrderedDict()  # the latest used one is the last

    def post(self, endpoint: Endpoint, *frames: bytes) -> None:
        """Send one message. Raises PeerAway if it cannot be, and then it will never arrive."""
        with self._lock:
            now = self._clock()
            line = self._lines.get(endpoint)
            if line is None:
                line = self._lines[endpoint] = _Line(self._connect(endpoint), now)
            line.used = now
            self._lines.move_to_end(endpoint)
            self._tidy(now)
            why = f"takes no messages: {MAX_WAITING} have waited for it, all are lost"
            try:
                sent = _send(line.socket, frames)
            except zmq.ZMQError as error:
                sent, why = False, f"cannot be reached: {error}"
            if not sent:
                # What listens there may be no rank, and then ZeroMQ would never connect again.
                self._drop(endpoint)
        if not sent:
            raise PeerAway(f"{endpoint} {why}")

    @property
    def endpoints(self) -> int:
        """To how many ranks there is a socket."""
        with self._lock:
            return len(self._lines)

    def close(self) -> None:
        """Close all sockets; what waits is lost. To post again makes new ones."""
        with self._lock:
            for endpoint in list(self._lines):
                self._drop(endpoint)

    def _connect(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        """A socket that connects by itself, as often as it has to."""
        try:
            sock = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            raise PeerAway(f"there is no socket for {endpoint}: {error}") from None
        host = endpoint.host.strip("[]")
        try:
            # One thread of ZeroMQ looks names up for all sockets, so a look-up that takes seconds would hold up all
            # ranks: `numeric` is for threads that may wait.
            ipaddress.ip_address(host)
            prepare(sock, MAX_MESSAGE_BYTES)
            sock.set(zmq.LINGER, 0)
            sock.set(zmq.SNDHWM, MAX_WAITING)
            sock.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
            sock.set(zmq.RECONNECT_IVL, AGAIN_MS)
            sock.set(zmq.RECONNECT_IVL_MAX, MAX_AGAIN_MS)
            sock.set(zmq.IPV6, int(":" in host))
            sock.connect(address_of(host, endpoint.port))
        except (ValueError, zmq.ZMQError) as error:
            sock.close()
            raise PeerAway(f"{endpoint} is no address of a rank (IP:port): {error}") from None
        return sock

    def _tidy(self, now: float) -> None:
        while len(self._lines) > MAX_ENDPOINTS or now - next(iter(self._lines.values())).used > IDLE_SECONDS:
            self._drop(next(iter(self._lines)))

    def _drop(self, endpoint: Endpoint) -> None:
        self._lines.pop(endpoint).socket.close()


def numeric(host: str) -> str:
    """The address of a rank's host. SGLang says a name if SGLANG_HOST_IP or HOST_IP is one, and binds to what it stands
    for in IPv4.

    Takes as long as the system needs to look it up. Raises PeerAway if it cannot.
    """
    try:
        ipaddress.ip_address(host.strip("[]"))
        return host
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        shown = printable(host, MAX_SHOWN)
        raise PeerAway(
            f"{shown} is no address and cannot be looked up: {error}; set SGLANG_HOST_IP on that host"
        ) from None


def _send(sock: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """Whether the socket has taken a message; never waits."""
    for _ in range(2):
        try:
            sock.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # In a burst ZeroMQ looks only now and then what has gone out, but always when it is asked.
            if not int(sock.get(zmq.EVENTS)) & zmq.POLLOUT:
                return False
        else:
            return True
    return False
