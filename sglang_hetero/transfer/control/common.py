"""What the service and its client have in common: socket options, and waking a thread."""

import contextlib
import socket
import threading

import zmq

from ..seal import OVERHEAD

HIGH_WATER = 256
"""Messages that wait per connection and direction; above it a sender is told so. A request makes one message per decode
rank, so this is several times the requests that start within one break of a connection."""
LINGER_MS = 500
"""For what was sent just before closing, and so the longest that closing waits for a peer that is away."""
CLOSE_SECONDS = 5.0
"""For the thread to end, beyond which closing gives up on it: a callback hangs."""
SILENCE_SECONDS = 15
"""A connection whose other end has confirmed nothing for so long is closed, and so made anew. TCP sees to it: with
ZeroMQ's own heartbeat (ZMQ_HEARTBEAT_IVL) libzmq 4.3.5 aborts the whole process, `Assertion failed: !_io_error`, when a
connection whose queue is full is reset before its next beat: a link that was cut for 15 s did that to the service every
time, and any client can."""
PROBE_SECONDS = 5
"""Between looks at a connection on which nothing is said."""
DRAIN = 64
"""Messages received in a row before the thread looks after anything else."""


def prepare(sock: zmq.Socket[bytes], max_bytes: int) -> None:
    """Options of both ends. Set before bind or connect. max_bytes: of a message that may arrive, without its seal."""
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.SNDHWM, HIGH_WATER)
    sock.set(zmq.RCVHWM, HIGH_WATER)
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
