"""A peer that sends more than is read and then vanishes costs its connection, not the process (libzmq 4.3.5)."""

import contextlib
import logging
import random
import socket
import struct
import subprocess
import sys
import time

import pytest
import zmq

from sglang_hetero.transfer.control import common
from sglang_hetero.transfer.faults import Faults

# Serves with a token until its standard input ends; prints its port first, and at the end that it lives.
WHOLE_SERVICE = """
import sys
from sglang_hetero.transfer.control import ControlService
from sglang_hetero.transfer.seal import Seal
with ControlService("127.0.0.1", seal=Seal(b"x" * 64)) as service:
    print(service.port, flush=True)
    sys.stdin.readline()
    print("lives" if not service.fault else service.fault, flush=True)
"""
ATTACKS = 25
"""While a queue to be received had a limit, about the sixth of them ended the process."""
# Binds a ROUTER with our options that nobody reads, prints its port, and says that it lives after some beats' time.
SERVICE = """
import sys, time, zmq
from sglang_hetero.transfer.control import common
context = zmq.Context()
router = context.socket(zmq.ROUTER)
common.prepare(router, 1024)
if "limit" in sys.argv:
    router.set(zmq.RCVHWM, common.HIGH_WATER)
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


PING = b"\x04\x0b\x04PING" + bytes(2) + b"hello"
"""ZMTP 3.1: a command of 11 bytes, with a TTL of 0 and a context."""


def _flood(port: int, messages: int = FLOOD, behind: bytes = b"", pause: float = STOPPED_SECONDS) -> None:
    """As a DEALER of ZMTP 3.1: shakes hands, sends more than a queue holds, and resets the connection."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(greeting + bytes([4, len(ready)]) + ready)
        stream = connection.makefile("rb")
        stream.read(len(greeting))
        stream.read(stream.read(2)[1])
        connection.sendall(b"\x00\x01x" * messages + behind)
        time.sleep(pause)


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


def test_with_a_limit_and_a_beat_of_zeromq_the_process_would_not() -> None:
    """Why what may be received has no limit, and TCP looks after silent connections; once this fails, libzmq has been
    mended."""
    assert not _survives("limit", "beat")


def test_the_service_survives_a_ping_behind_a_flood() -> None:
    """libzmq answers a PING that it finds in its buffer after the connection was reset."""
    rng = random.Random(0)
    command = [sys.executable, "-c", WHOLE_SERVICE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as service:
        assert service.stdin is not None and service.stdout is not None
        port = int(service.stdout.readline())
        for _ in range(ATTACKS):
            with contextlib.suppress(OSError):  # also of a service that is dead: seen below
                _flood(port, rng.randrange(300, 2700), PING, rng.choice((0.0, 0.001, 0.004)))
        with contextlib.suppress(OSError):
            service.stdin.write("\n")
            service.stdin.flush()
        lives = service.stdout.readline()
        service.wait(WAIT_SECONDS)
    assert lives == "lives\n"


def test_what_waits_for_its_turn_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are dropped and counted; what is kept comes in order, and all of the socket is read."""
    monkeypatch.setattr(common, "WAITING_MESSAGES", 100)
    faults = Faults("test", logging.getLogger(__name__))
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock, context.socket(zmq.PAIR) as peer:
        for each in (sock, peer):
            each.set(zmq.RCVHWM, 0)
            each.set(zmq.SNDHWM, 0)
            each.set(zmq.LINGER, 0)
        sock.bind("inproc://intake")
        peer.connect("inproc://intake")
        for number in range(150):
            peer.send(b"%d" % number)
        intake = common.Intake(sock, faults)
        taken = intake.take()
        assert [frame for (frame,) in taken] == [b"%d" % number for number in range(common.DRAIN)]
        assert faults.counts == {"flooded": 50} and len(intake) == 100 - common.DRAIN
        peer.send(b"last")
        rest = intake.take()
        assert [frame for (frame,) in rest] == [b"%d" % number for number in range(common.DRAIN, 100)] + [b"last"]
        monkeypatch.setattr(common, "WAITING_BYTES", 5)
        peer.send(b"12345")
        peer.send(b"6")
        assert intake.take() == [[b"12345"]] and faults.counts == {"flooded": 51} and not intake
        peer.send(b"6")
        assert intake.take() == [[b"6"]], "what has had its turn counts no more"


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_a_silent_connection_is_noticed_by_tcp_alone(kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as sock:
        common.prepare(sock, 1024)
        assert sock.get(zmq.HEARTBEAT_IVL) == 0
        assert sock.get(zmq.TCP_KEEPALIVE) == 1
        probes = sock.get(zmq.TCP_KEEPALIVE_IDLE) + sock.get(zmq.TCP_KEEPALIVE_INTVL) * sock.get(zmq.TCP_KEEPALIVE_CNT)
        assert probes == common.SILENCE_SECONDS
        assert sock.get(zmq.TCP_MAXRT) == common.SILENCE_SECONDS * 1000
