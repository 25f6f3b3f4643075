"""Messages to other ranks: nobody waits, whatever becomes of the rank, and one that comes back is reached again."""

import contextlib
import socket
import threading
from contextlib import contextmanager

import pytest
import zmq

from sglang_hetero.backend import posts as posts_module
from sglang_hetero.backend.posts import Posts
from sglang_hetero.errors import PeerAway
from sglang_hetero.transfer.link import Endpoint
from tests.unit.backend.prefill_server import SOON, free_port, until
from tests.unit.transfer.control.peers import HOST

NOBODY = 7
"""A port; whether anybody listens there does not matter."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"OTHER".ljust(20, b"\0") + bytes(32)
"""What a ZeroMQ socket says first that wants an authentication that ours does not know."""


@pytest.fixture
def posts():
    made = Posts()
    yield made
    if made._lock.acquire(timeout=SOON):  # else a test has found one that waits
        made._lock.release()
        made.close()


@contextmanager
def rank(port, host=HOST):
    """The socket at which SGLang's manager of a rank receives."""
    context = zmq.Context()
    sock = context.socket(zmq.PULL)
    sock.setsockopt(zmq.IPV6, int(":" in host))
    sock.setsockopt(zmq.RCVTIMEO, int(SOON * 1000))
    sock.setsockopt(zmq.LINGER, 0)
    sock.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    try:
        yield sock
    finally:
        sock.close()
        context.term()


def number(value):
    return value.to_bytes(4, "big")


def unhindered(job):
    """Run it on a thread that may not be held up; what it returned."""
    found = []
    thread = threading.Thread(target=lambda: found.append(job()), daemon=True)
    thread.start()
    thread.join(SOON)
    assert found, "a post waits"
    return found[0]


def away(posts, endpoint, count):
    """Post so many messages; how many could not be."""
    refused = 0
    for each in range(count):
        try:
            posts.post(endpoint, number(each))
        except PeerAway as error:
            assert str(endpoint) in str(error)
            refused += 1
    return refused


def reach(posts, endpoint, sock, payload):
    """Post until it arrives: what was posted before may have been lost."""

    def arrives():
        posts.post(endpoint, payload)
        return sock.poll(50) and payload in iter(lambda: sock.recv(zmq.NOBLOCK) if sock.poll(0) else None, None)

    until(arrives)


def test_a_rank_gets_one_frame_per_message_in_order(posts):
    endpoint = Endpoint(HOST, free_port())
    with rank(endpoint.port) as sock:
        for each in range(100):
            posts.post(endpoint, number(each))
        assert [sock.recv_multipart() for _ in range(100)] == [[number(each)] for each in range(100)]


def test_what_was_posted_before_the_rank_listened_arrives(posts):
    endpoint = Endpoint(HOST, free_port())
    assert unhindered(lambda: away(posts, endpoint, 1001)) == 0
    with rank(endpoint.port) as sock:
        assert [sock.recv() for _ in range(1001)] == [number(each) for each in range(1001)]


def test_nobody_waits_for_a_rank_that_is_away(posts, monkeypatch):
    monkeypatch.setattr(posts_module, "MAX_WAITING", 50)
    endpoint = Endpoint(HOST, free_port())
    assert unhindered(lambda: away(posts, endpoint, 1001)) >= 10
    with rank(endpoint.port) as sock:
        reach(posts, endpoint, sock, b"the next one")


def test_nobody_waits_for_a_rank_that_takes_nothing(posts, monkeypatch):
    monkeypatch.setattr(posts_module, "MAX_WAITING", 50)
    with socket.create_server((HOST, 0)) as stopped:  # the system takes the connection, the process does not
        endpoint = Endpoint(HOST, stopped.getsockname()[1])
        assert unhindered(lambda: away(posts, endpoint, 1001)) >= 10


def test_a_rank_that_was_away_is_reached_again(posts):
    endpoint = Endpoint(HOST, free_port())
    for start in range(3):
        with rank(endpoint.port) as sock:
            reach(posts, endpoint, sock, b"%d" % start)
        unhindered(lambda: away(posts, endpoint, 20))
    assert posts.endpoints == 1


def test_a_rank_where_something_else_listened(posts, monkeypatch):
    """ZeroMQ gives such a socket up for good."""
    monkeypatch.setattr(posts_module, "MAX_WAITING", 50)
    with socket.create_server((HOST, 0)) as other:
        endpoint = Endpoint(HOST, other.getsockname()[1])
        posts.post(endpoint, b"hello")
        connection, _ = other.accept()
        connection.settimeout(SOON)
        connection.sendall(GREETING)
        until(lambda: connection.recv(4096) == b"")
        connection.close()

    def heard():
        try:
            posts.post(endpoint, b"hello again")
        except PeerAway:
            return False
        return sock.poll(20)

    with rank(endpoint.port) as sock:
        until(heard)


def test_a_lost_rank_does_not_keep_messages_from_others(posts, monkeypatch):
    monkeypatch.setattr(posts_module, "MAX_WAITING", 50)
    lost, well = Endpoint(HOST, free_port()), Endpoint(HOST, free_port())
    with rank(well.port) as sock:
        for each in range(200):
            away(posts, lost, 1)
            posts.post(well, number(each))
            assert sock.recv() == number(each)


def test_many_threads_post_at_the_same_time(posts):
    endpoints = [Endpoint(HOST, free_port()) for _ in range(2)]
    threads, count = 8, 200

    def post(thread):
        for each in range(count):
            for endpoint in endpoints:
                posts.post(endpoint, bytes([thread]) + number(each))

    workers = [threading.Thread(target=post, args=(thread,)) for thread in range(threads)]
    with rank(endpoints[0].port) as first, rank(endpoints[1].port) as second:
        for worker in workers:
            worker.start()
        for sock in (first, second):
            found = [sock.recv() for _ in range(threads * count)]
            for thread in range(threads):
                own = [each[1:] for each in found if each[0] == thread]
                assert own == [number(each) for each in range(count)]
    for worker in workers:
        worker.join(SOON)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(posts, host):
    port = NOBODY
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:  # where the host has it
        sock.bind(("::1", 0))
        port = sock.getsockname()[1]
    posts.post(Endpoint(host, port), b"x")
    line = posts._lines[Endpoint(host, port)]
    assert line.socket.get_string(zmq.LAST_ENDPOINT) == f"tcp://[::1]:{port}"
    if port != NOBODY:
        posts.close()
        with rank(port, "::1") as sock:
            reach(posts, Endpoint(host, port), sock, host.encode())


def test_a_host_that_is_a_name_becomes_an_address():
    assert posts_module.numeric("localhost") == "127.0.0.1"
    for host in ("10.0.0.1", "::1", "[::1]"):
        assert posts_module.numeric(host) == host
    for host in ("no.such.host.invalid", "a b", "x" * 400):
        with pytest.raises(PeerAway, match="cannot be looked up"):
            posts_module.numeric(host)


def test_frames_of_sglang(posts):
    endpoint = Endpoint(HOST, free_port())
    with rank(endpoint.port) as sock:
        posts.post(endpoint, b"tag", b"", b"7")
        assert sock.recv_multipart() == [b"tag", b"", b"7"]


@pytest.mark.parametrize("endpoint", [Endpoint("a b", 1), Endpoint("a/b", 1), Endpoint("localhost", 1)])
def test_what_is_no_address(posts, endpoint):
    with pytest.raises(PeerAway, match="no address"):
        posts.post(endpoint, b"x")
    assert posts.endpoints == 0


def test_sockets_are_bounded_and_the_latest_used_ones_stay(posts, monkeypatch):
    monkeypatch.setattr(posts_module, "MAX_ENDPOINTS", 3)
    used = Endpoint(HOST, free_port())
    with rank(used.port) as sock:
        posts.post(used, b"first")
        connected = posts._lines[used].socket
        assert sock.recv() == b"first"
        for port in range(9000, 9020):
            posts.post(Endpoint(HOST, port), b"x")
            posts.post(used, number(port))
            assert sock.recv() == number(port)
    assert posts.endpoints == 3
    assert posts._lines[used].socket is connected


def test_sockets_that_nobody_uses_are_closed():
    now = [0.0]
    posts = Posts(clock=lambda: now[0])
    former, used = Endpoint(HOST, 9000), Endpoint(HOST, 9001)
    posts.post(former, b"x")
    for _ in range(4):
        posts.post(used, b"x")
        now[0] += posts_module.IDLE_SECONDS / 2
    assert list(posts._lines) == [used]
    socket_of = posts._lines[used].socket
    posts.close()
    assert socket_of.closed
    assert posts.endpoints == 0


class Burst:
    """A socket that has room, which it notices when it is asked for its state."""

    def __init__(self, room):
        self.room, self.noticed, self.sent = room, False, []

    def send_multipart(self, frames, flags):
        assert flags == zmq.NOBLOCK
        if not self.noticed:
            raise zmq.Again
        self.sent.append(frames)

    def get(self, option):
        assert option == zmq.EVENTS
        self.noticed = self.room
        return zmq.POLLOUT if self.room else 0


@pytest.mark.parametrize("room", [True, False])
def test_a_burst_is_not_taken_for_a_rank_that_is_away(room):
    burst = Burst(room)
    assert posts_module._send(burst, [b"x"]) is room
    assert burst.sent == [[b"x"]] * room
