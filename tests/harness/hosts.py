"""Two hosts on one machine: a network namespace each, and a wire between them that can be slow, narrow or cut.

The wire is a pair of TUN devices whose packets a thread of this process carries from one to the other, so delay, rate
and cut need no traffic shaper in the kernel (netem is often not built in). A namespace lives as long as its descriptor
here or a process in it, so nothing stays behind.
"""

import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

NAMESPACE_ENV = "HARNESS_NETWORK"
"""In the environment of a side: the path of the network namespace that its processes enter before anything else."""

# linux/sched.h, linux/sockios.h, linux/if.h, linux/if_tun.h
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _SIOCGIFFLAGS = 0x8914, 0x8913
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_IFF_UP = 0x1
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_TUN = "/dev/net/tun"

DEVICE = "wire0"
"""Name of the interface on either host."""
MTU = 9000
"""Jumbo frames: a packet costs Python the same, whatever its size."""
BUFFER_BYTES = 1 << 20
"""What a narrow wire holds back before it drops, as a switch's buffer does."""
NETMASK = "255.255.255.0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")

T = TypeVar("T")


def obstacle() -> str:
    """Why there can be no two hosts here; empty if there can."""
    if not os.path.exists(_TUN):
        return f"needs {_TUN}, which is not there"
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    missing = [
        name
        for name, number in (("CAP_NET_ADMIN", _CAP_NET_ADMIN), ("CAP_SYS_ADMIN", _CAP_SYS_ADMIN))
        if not capabilities >> number & 1
    ]
    return f"needs {' and '.join(missing)}, which this process has not" if missing else ""


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace; processes that it forks begin there."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _check(ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET), f"entering {namespace}")
    finally:
        os.close(descriptor)


def _in_thread(work: Callable[[], T]) -> T:
    """Run in a thread that ends then: a namespace belongs to a thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@dataclass
class Host:
    """One host: its address, the namespace that its processes enter, its end of the wire."""

    address: str
    namespace: int
    tun: int

    @classmethod
    def create(cls, address: str) -> "Host":
        """A new namespace with a loopback interface and its end of the wire."""

        def make() -> "Host":
            _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET), "a new network namespace")
            tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, NETMASK)):
                    sockaddr = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                    fcntl.ioctl(control, request, struct.pack("16s16s8x", DEVICE.encode(), sockaddr))
                fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), MTU))
                for device in ("lo", DEVICE):
                    _set_up(control, device, up=True)
            return cls(address, os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun)

        return _in_thread(make)

    @property
    def path(self) -> str:
        """Of the namespace, for `enter` in any process of this user."""
        return f"/proc/{os.getpid()}/fd/{self.namespace}"

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes on this host."""
        return {
            NAMESPACE_ENV: self.path,
            "SGLANG_HOST_IP": self.address,
            "SGLANG_LOCAL_IP_NIC": DEVICE,
            "no_proxy": "*",
            "NO_PROXY": "*",
        }

    def plug(self, *, up: bool) -> None:
        """Take the host's interface up or down: down, every address of the other host is unreachable at once."""

        def work() -> None:
            enter(self.path)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                _set_up(control, DEVICE, up=up)

        _in_thread(work)

    def close(self) -> None:
        os.close(self.tun)
        os.close(self.namespace)


def _set_up(control: socket.socket, device: str, *, up: bool) -> None:
    request = struct.pack("16sH22x", device.encode(), 0)
    (flags,) = struct.unpack("16xH22x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
    flags = flags | _IFF_UP if up else flags & ~_IFF_UP
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags))


@dataclass
class Way:
    """One direction of the wire."""

    source: int
    destination: int
    carried: int = 0
    """Bytes of packets that were taken over since the wire was made."""
    free_at: float = 0.0
    """When the last packet's last bit will have left a narrow wire."""
    queue: list[tuple[float, int, bytes]] = field(default_factory=list)
    """Packets on their way: when they arrive, a number for their order, bytes."""


class Wire:
    """Two hosts and what is between them. Use as a context manager.

    delay: seconds from one end to the other. rate: bits per second, 0 for no limit. All may change at any time.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.rate = 0.0
        self.failure = ""
        """Why the thread that carries packets has ended, though nobody asked it to."""
        self._cut = False
        self._stop, self._stopped = os.pipe()
        self.hosts = [Host.create(address) for address in ADDRESSES]
        first, second = self.hosts
        self.ways = (Way(first.tun, second.tun), Way(second.tun, first.tun))
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        self._thread.start()

    # What happens to it.

    def cut(self) -> None:
        """From now on packets vanish, in both directions; neither host is told."""
        self._cut = True

    def mend(self) -> None:
        """Packets arrive again."""
        self._cut = False

    @contextmanager
    def slow(self, delay: float = 0.0, rate: float = 0.0) -> Iterator[None]:
        """With this delay and rate."""
        self.delay, self.rate = delay, rate
        try:
            yield
        finally:
            self.delay, self.rate = 0.0, 0.0

    # The thread.

    def _carry(self) -> None:
        try:
            while True:
                due = min((way.queue[0][0] for way in self.ways if way.queue), default=None)
                timeout = None if due is None else max(0.0, due - time.monotonic())
                readable, _, _ = select.select([self._stop, *(way.source for way in self.ways)], [], [], timeout)
                if self._stop in readable:
                    return
                for way in self.ways:
                    if way.source in readable:
                        self._take(way)
                    self._deliver(way)
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def _take(self, way: Way) -> None:
        """Put what a host has sent on its way."""
        while True:
            try:
                packet = os.read(way.source, MTU)
            except BlockingIOError:
                return
            except OSError:  # its interface is down
                return
            now = time.monotonic()
            way.carried += len(packet)
            if self._cut:
                continue
            if self.rate:
                waiting = max(0.0, way.free_at - now) * self.rate / 8
                if waiting > BUFFER_BYTES:
                    continue
                way.free_at = max(now, way.free_at) + len(packet) * 8 / self.rate
                now = way.free_at
            heapq.heappush(way.queue, (now + self.delay, way.carried, packet))

    def _deliver(self, way: Way) -> None:
        """Give the other host what has arrived."""
        now = time.monotonic()
        while way.queue and way.queue[0][0] <= now:
            _, _, packet = heapq.heappop(way.queue)
            if self._cut:
                continue
            try:
                os.write(way.destination, packet)
            except OSError:  # its interface is down, or it has no room: as a network card, it drops
                continue

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        for host in self.hosts:
            host.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
