"""What the service and its client have in common: socket options, and waking a thread."""

import contextlib
import socket
import threading
from collections import deque

import zmq

from ..faults import Faults
from ..seal import OVERHEAD

HIGH_WATER = 256
"""Messages that wait to be sent per connection; above it a sender is told so. A request makes one message per decode
rank, so this is several times the requests that start within one break of a connection."""
NO_LIMIT = 0
"""ZMQ_RCVHWM. With a limit anybody who can connect can end the process: when the queue to be received is full and the
connection is reset, libzmq 4.3.5 reads a PING of the peer that is left in its buffer, answers, and aborts (`Assertion
failed: !_io_error`). So ZeroMQ takes everything, and `Intake` keeps what has a use."""
WAITING_MESSAGES, WAITING_BYTES = 4096, 64 << 20
"""What may wait for its turn in `Intake`; as much as the service parks."""
AT_ONCE = 4096
"""Messages read from the socket before some of those that wait have their turn."""
LINGER_MS = 500
"""For what was sent just before closing, and so the longest that closing waits for a peer that is away."""
CLOSE_SECONDS = 5.0
"""For the thread to end, beyond which closing gives up on it: a callback hangs."""
SILENCE_SECONDS = 15
"""A connection whose other end has confirmed nothing for so long is closed, and so made anew. TCP sees to it, and not
ZeroMQ's own heartbeat (ZMQ_HEARTBEAT_IVL): its PING brings the abort described at NO_LIMIT about by itself. A link that
was cut for 15 s did that to the service every time, while the queue had a limit."""
PROBE_SECONDS = 5
"""Between looks at a connection on which nothing is said."""
DRAIN = 64
"""Messages handled in a row before the thread looks after anything else."""


def prepare(sock: zmq.Socket[bytes], max_bytes: int) -> None:
    """Options of both ends. Set before bind or connect. max_bytes: of a message that may arrive, without its seal."""
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.SNDHWM, HIGH_WATER)
    sock.set(zmq.RCVHWM, NO_LIMIT)
    sock.set(zmq.MAXMSGSIZE, max_bytes + OVERHEAD)
    sock.set(zmq.TCP_MAXRT, SILENCE_SECONDS * 1000)
    sock.set(zmq.TCP_KEEPALIVE, 1)
    sock.set(zmq.TCP_KEEPALIVE_IDLE, PROBE_SECONDS)
    sock.set(zmq.TCP_KEEPALIVE_INTVL, PROBE_SECONDS)
    sock.set(zmq.TCP_KEEPALIVE_CNT, SILENCE_SECONDS // PROBE_SECONDS - 1)
    sock.set(zmq.IPV6, 1)


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's name of a TCP address. port: `*` for a free one."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Intake:
    """What has arrived at a socket and waits for its turn. It is for the socket's thread only.

    The socket is emptied each time, so that memory is bounded here: what comes while so much waits is dropped, as if it
    had been lost on the way, and counted.
    """

    def __init__(self, sock: "zmq.Socket[bytes]", faults: Faults) -> None:
        self._socket, self._faults = sock, faults
        self._waiting: deque[list[bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> list[list[bytes]]:
        """The next messages whose turn it is, as frames, in the order of their arrival; never waits."""
        self._empty_socket()
        turn = [self._waiting.popleft() for _ in range(min(DRAIN, len(self._waiting)))]
        self._bytes -= sum(map(_size, turn))
        return turn

    def _empty_socket(self) -> None:
        dropped = 0
        for _ in range(AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            if len(self._waiting) >= WAITING_MESSAGES or self._bytes + _size(frames) > WAITING_BYTES:
                dropped += 1
                continue
            self._waiting.append(frames)
            self._bytes += _size(frames)
        if dropped:
            text = f"{dropped} messages dropped, {len(self._waiting)} wait for their turn"
            self._faults.note("flooded", text, times=dropped)


def _size(frames: list[bytes]) -> int:
    return sum(map(len, frames))


class Wake:
    """Ends another thread's poll, from any thread: unlike a ZeroMQ socket, a socket of the system may be shared."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.Lock()  # a number that is free again may soon be another file's
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        # Full: it is set already. Closed: nobody polls any more.
        with self._lock, contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()
