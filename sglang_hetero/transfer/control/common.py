"""What the service and its client have in common: socket options, waking a thread, counting faults."""

import contextlib
import logging
import socket
import threading
from collections import Counter

import zmq

HIGH_WATER = 256
"""Messages that wait per connection and direction; above it a sender is told so. A request makes one message per decode
rank, so this is several times the requests that start within one break of a connection."""
LINGER_MS = 500
"""For what was sent just before closing, and so the longest that closing waits for a peer that is away."""
CLOSE_SECONDS = 5.0
"""For the thread to end, beyond which closing gives up on it: a callback hangs."""
BEAT_MS = 5_000
"""ZeroMQ's own heartbeat: a connection whose other end vanished without a word is closed, and so made anew."""
BEAT_TIMEOUT_MS = 3 * BEAT_MS
DRAIN = 64
"""Messages received in a row before the thread looks after anything else."""


def prepare(sock: zmq.Socket[bytes], max_bytes: int) -> None:
    """Options of both ends. Set before bind or connect. max_bytes: of a message that may arrive."""
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.SNDHWM, HIGH_WATER)
    sock.set(zmq.RCVHWM, HIGH_WATER)
    sock.set(zmq.MAXMSGSIZE, max_bytes)
    sock.set(zmq.HEARTBEAT_IVL, BEAT_MS)
    sock.set(zmq.HEARTBEAT_TIMEOUT, BEAT_TIMEOUT_MS)
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


class Faults:
    """Counts what went wrong by kind and logs the first of each kind, so that a broken peer cannot fill the log."""

    def __init__(self, owner: str, log: logging.Logger) -> None:
        self._owner, self._log = owner, log
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, text: object, *, traceback: bool = False) -> None:
        """kind: from a small set, never a peer's text. traceback: of the exception being handled."""
        with self._lock:
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        if first:
            self._log.warning("%s: %s: %s (further ones are only counted)", self._owner, kind, text, exc_info=traceback)

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
