"""Two hosts with a wire between: it delays, narrows and cuts as told, and a pair hands over across it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.harness import Handoff, Harness, hosts
from tests.harness.hosts import Host, Wire
from tests.harness.product import check, check_all_is_back, check_ours, geometry

pytestmark = pytest.mark.skipif(bool(hosts.obstacle()), reason=f"two hosts on one machine: {hosts.obstacle()}")

PORT = 5000
WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with Wire() as wire:
        yield wire
        assert not wire.failure


def on(host: Host, work: Callable[[], None]) -> threading.Thread:
    """Run in a thread on that host."""

    def run() -> None:
        hosts.enter(host.path)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def carried(wire: Wire, count: int, meanwhile: Callable[[], None] = lambda: None) -> tuple[float, int]:
    """Send `count` bytes from the first host to the second; the seconds from connecting to the last one, and how many
    had arrived then. `meanwhile` runs when some have."""
    first, second = wire.hosts
    arrived = 0
    begun = threading.Event()
    listening = threading.Event()
    ends: list[float] = []

    def receive() -> None:
        nonlocal arrived
        with socket.create_server((second.address, PORT)) as server:
            server.settimeout(WAIT_SECONDS)
            listening.set()
            connection, _ = server.accept()
            connection.settimeout(WAIT_SECONDS)
            while data := connection.recv(1 << 16):
                arrived += len(data)
                begun.set()
            ends.append(time.monotonic())

    def send() -> None:
        ends.insert(0, time.monotonic())
        with socket.create_connection((second.address, PORT), timeout=WAIT_SECONDS) as connection:
            connection.sendall(bytes(count))

    receiver = on(second, receive)
    assert listening.wait(WAIT_SECONDS)
    sender = on(first, send)
    assert begun.wait(WAIT_SECONDS)
    meanwhile()
    for thread in (sender, receiver):
        thread.join(WAIT_SECONDS)
    return ends[1] - ends[0], arrived


def test_the_hosts_are_neither_this_one_nor_each_other(wire: Wire) -> None:
    seconds, arrived = carried(wire, 1 << 20)
    assert arrived == 1 << 20 and seconds < WAIT_SECONDS
    with pytest.raises(OSError):  # this host has no such address
        socket.create_server((wire.hosts[0].address, PORT))


def test_a_round_trip_takes_twice_the_delay(wire: Wire) -> None:
    with wire.slow(delay=0.1):
        seconds, arrived = carried(wire, 1)
    assert arrived == 1
    assert seconds >= 0.3  # connecting there and back, then the byte


def test_a_narrow_wire_is_no_faster_than_its_rate(wire: Wire) -> None:
    with wire.slow(rate=20e6):
        seconds, arrived = carried(wire, 1 << 20)
    assert arrived == 1 << 20
    assert seconds >= ((1 << 20) - hosts.BUFFER_BYTES // 2) * 8 / 20e6


def test_what_is_sent_over_a_cut_wire_arrives_when_it_is_mended(wire: Wire) -> None:
    """And not before: TCP repeats it."""

    def cut_and_mend() -> None:
        wire.cut()
        time.sleep(0.1)  # what was in the second host's hands
        before = wire.ways[1].carried, wire.ways[0].carried
        time.sleep(0.7)
        assert wire.ways[0].carried > before[1], "the sender repeats"
        wire.mend()

    started = time.monotonic()
    with wire.slow(rate=20e6):
        _, arrived = carried(wire, 4 << 20, cut_and_mend)
    assert arrived == 4 << 20
    assert time.monotonic() - started > 0.8


def test_without_its_interface_a_host_reaches_nobody_at_once(wire: Wire) -> None:
    first, second = wire.hosts
    errors: list[OSError] = []

    def connect() -> None:
        try:
            socket.create_connection((first.address, PORT), timeout=WAIT_SECONDS).close()
        except OSError as error:
            errors.append(error)

    second.plug(up=False)
    try:
        on(second, connect).join(WAIT_SECONDS)
    finally:
        second.plug(up=True)
    on(second, connect).join(WAIT_SECONDS)
    unreachable, refused = errors
    assert "unreachable" in str(unreachable)
    assert isinstance(refused, ConnectionRefusedError), "the wire works again, and nobody listens"


def test_a_pair_hands_over_across_two_hosts(harness: Harness, wire: Wire) -> None:
    prefill, decode = wire.hosts
    before = wire.ways[0].carried
    with harness.pair(
        geometry(64),
        prefill_tp=2,
        decode_tp=1,
        prefill_env=prefill.environment,
        decode_env=decode.environment,
        hosts=(prefill.address, decode.address),
    ) as pair:
        check(pair, [Handoff(200, 2, seed=1), Handoff(65, seed=2)])
        check_ours(pair)
        sent = sum(counters.get("bytes", 0) for counters in pair.hetero("hetero_counters"))
        assert wire.ways[0].carried - before > sent > 0, "the bytes have gone another way"
        check_all_is_back(pair)
