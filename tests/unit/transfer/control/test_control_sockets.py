"""A peer that sends more than is read and then vanishes costs its connection, not the process (libzmq 4.3.5)."""

import socket
import struct
import subprocess
import sys
import time

import pytest
import zmq

from sglang_hetero.transfer.control import common

# Binds a ROUTER with our options that nobody reads, prints its port, and says that it lives after some beats' time.
SERVICE = """
import sys, time, zmq
from sglang_hetero.transfer.control import common
context = zmq.Context()
router = context.socket(zmq.ROUTER)
common.prepare(router, 1024)
if "beat" in sys.argv:
    router.set(zmq.HEARTBEAT_IVL, 200)
    router.set(zmq.HEARTBEAT_TIMEOUT, 60_000)
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
sys.stdin.readline()
time.sleep(float(sys.argv[1]))
print("lives", flush=True)
context.destroy(linger=0)
"""
BEATS_SECONDS = 1.0
STOPPED_SECONDS = 0.5
"""For the service to stop reading: what it has not read is gone with the connection."""
FLOOD = 40 * common.HIGH_WATER
WAIT_SECONDS = 60.0


def _flood(port: int) -> None:
    """As a DEALER of ZMTP 3.0: shakes hands, sends more than a queue holds, and resets the connection."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(greeting + bytes([4, len(ready)]) + ready)
        stream = connection.makefile("rb")
        stream.read(len(greeting))
        stream.read(stream.read(2)[1])
        connection.sendall(b"\x00\x01x" * FLOOD)
        time.sleep(STOPPED_SECONDS)


def _survives(*arguments: str) -> bool:
    command = [sys.executable, "-c", SERVICE, str(BEATS_SECONDS), *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as service:
        assert service.stdin is not None and service.stdout is not None
        _flood(int(service.stdout.readline()))
        service.stdin.write("\n")
        service.stdin.flush()
        lives = service.stdout.readline() == "lives\n"
        service.wait(WAIT_SECONDS)
    return lives


def test_our_sockets_survive_a_peer_that_floods_and_resets() -> None:
    assert _survives()


def test_with_a_beat_of_zeromq_the_process_would_not() -> None:
    """Why it is TCP that looks after silent connections; once this fails, libzmq has been mended."""
    assert not _survives("beat")


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_a_silent_connection_is_noticed_by_tcp_alone(kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as sock:
        common.prepare(sock, 1024)
        assert sock.get(zmq.HEARTBEAT_IVL) == 0
        assert sock.get(zmq.TCP_KEEPALIVE) == 1
        probes = sock.get(zmq.TCP_KEEPALIVE_IDLE) + sock.get(zmq.TCP_KEEPALIVE_INTVL) * sock.get(zmq.TCP_KEEPALIVE_CNT)
        assert probes == common.SILENCE_SECONDS
        assert sock.get(zmq.TCP_MAXRT) == common.SILENCE_SECONDS * 1000
