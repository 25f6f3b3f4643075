"""Free TCP ports on one address, in blocks, below the range from which the kernel hands out its own."""

import contextlib
import random
import socket

import psutil

from sglang_hetero.errors import HeteroError

# Below it are well-known services; SGLang and Mooncake draw from 12000 up as well, so collisions are tried out, not
# excluded.
LOWEST = 15000
# Linux' default lower end of its ephemeral range, for a host without /proc.
DEFAULT_EPHEMERAL = 32768
ATTEMPTS = 200
HIGHEST_PORT = 65535


class PortError(HeteroError):
    """A port is in use, or none is free."""


def ephemeral_start() -> int:
    """First port that the kernel may give to an outgoing connection: a server that binds late must stay below it."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL


def is_free(port: int, host: str) -> bool:
    """Whether a server could bind `port` now, on `host` and on all addresses (SGLang binds either)."""
    for address in {host, "0.0.0.0"}:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As servers do: a connection in TIME_WAIT does not keep them from binding.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def owner(port: int) -> str:
    """Who listens on `port`, as far as this user may know: `` (pid 123, python)`` or nothing."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f" (pid {connection.pid}, {psutil.Process(connection.pid).name()})"
    return ""


class Ports:
    """Hands out each port once. Free means free at the time of asking: the servers bind them some seconds later."""

    def __init__(self, host: str) -> None:
        """Raises `PortError` when `host` is not an address of this machine."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise PortError(f"--host {host}: this machine cannot listen there: {error.strerror}") from error
        self.host = host
        self._taken: set[int] = set()

    def take(self, port: int, option: str) -> int:
        """Claim the port that the user asked for with `option`; raises `PortError` when it is in use."""
        if not 1 <= port <= HIGHEST_PORT:
            raise PortError(f"{option} {port}: a TCP port is 1 to {HIGHEST_PORT}")
        if port in self._taken or not is_free(port, self.host):
            raise PortError(
                f"{option} {port}: the port is in use on {self.host}{owner(port)}; choose another, or leave {option} "
                "out and a free one is taken"
            )
        self._taken.add(port)
        return port

    def free(self, count: int = 1) -> int:
        """First of `count` consecutive free ports; raises `PortError` when none was found."""
        highest = ephemeral_start() - count
        if highest < LOWEST:
            # Tuned hosts give nearly all ports to outgoing connections: then a server takes its chance among them.
            highest = HIGHEST_PORT - count
        for _ in range(ATTEMPTS):
            start = random.randint(LOWEST, highest)
            block = range(start, start + count)
            if all(port not in self._taken and is_free(port, self.host) for port in block):
                self._taken.update(block)
                return start
        raise PortError(f"no {count} free TCP ports in a row between {LOWEST} and {highest} on {self.host}")
