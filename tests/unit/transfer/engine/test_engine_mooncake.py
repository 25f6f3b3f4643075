"""Real Mooncake over TCP between processes: every byte compared; what fails is told apart."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hetero.transfer.engine import EngineError
from sglang_hetero.transfer.engine.mooncake import OTHER, TCP, Limits, Mooncake, limits_for, refuses_connections

POISON = 0xFF
BYTES = 8 << 20
START_SECONDS = 60
LAND_SECONDS = 10
PATIENCE = 1.0
# The least that Mooncake accepts.
TRANSFER_SECONDS = 5


class Peer:
    def __init__(self, folder: Path):
        path = folder / "memory"
        path.write_bytes(b"\xff" * (BYTES + mmap.PAGESIZE))
        with path.open("r+b") as file:
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        command = [sys.executable, Path(__file__).with_name("engine_peer.py"), path]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, env=os.environ | {"MC_FORCE_TCP": "1"}, **pipes)
        for line in self.process.stdout:
            if line.startswith("ready"):
                _, self.session, address = line.split()
                self.address = int(address)
                return
        pytest.fail("the peer did not start")

    def stand_still(self):
        """Returns when every thread has stopped: the signal alone leaves them time for a small write."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        deadline = time.monotonic() + LAND_SECONDS
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture
def start_peer(tmp_path_factory):
    peers = []

    def start():
        peers.append(Peer(tmp_path_factory.mktemp("peer")))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    peer = Peer(tmp_path_factory.mktemp("peer"))
    yield peer
    peer.end()


@pytest.fixture(scope="module")
def upstream():
    """As SGLang's MooncakeTransferEngine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", "1")
        patch.setenv("MC_TRANSFER_TIMEOUT", str(TRANSFER_SECONDS))
        from mooncake.engine import TransferEngine

        native = TransferEngine()
        assert native.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return SimpleNamespace(engine=native, session_id=f"127.0.0.1:{native.get_rpc_port()}")


@pytest.fixture
def source():
    """Random bytes without POISON, so that what was not written shows."""
    return np.random.default_rng(7).integers(0, POISON, BYTES, dtype=np.uint8)


@pytest.fixture
def engine(upstream, source):
    engine = Mooncake(upstream, TCP, patience=PATIENCE)
    engine.register([(source.ctypes.data, source.nbytes)])
    yield engine
    engine.close()


def scattered(count, bytes_each, seed=0):
    """Offsets of pieces in random places, apart by at least one byte: here, and there."""
    rng = np.random.default_rng(seed)
    spacing = BYTES // count
    assert spacing > bytes_each
    slots = np.arange(count, dtype=np.uint64) * np.uint64(spacing)
    return rng.permutation(slots), slots + rng.integers(0, spacing - bytes_each, count).astype(np.uint64)


def expected(source, near, far, sizes):
    result = np.full(BYTES + mmap.PAGESIZE, POISON, np.uint8)
    for here, there, size in zip(near.tolist(), far.tolist(), sizes.tolist(), strict=True):
        result[there : there + size] = source[here : here + size]
    return result


def places(source, peer, near, far):
    return near + np.uint64(source.ctypes.data), far + np.uint64(peer.address)


@pytest.mark.parametrize(
    ("count", "bytes_each"), [(1, 4 << 20), (1, 1), (255, 4096), (256, 1000), (257, 512), (3001, 512)]
)
def test_write_moves_these_bytes_and_no_others(engine, peer, source, count, bytes_each):
    peer.memory[:] = POISON
    near, far = scattered(count, bytes_each, seed=count)
    sizes = np.full(count, bytes_each, np.uint64)
    engine.write(peer.session, *places(source, peer, near, far), sizes)
    np.testing.assert_array_equal(peer.memory, expected(source, near, far, sizes))


def test_read_moves_these_bytes_and_no_others(engine, peer, source):
    peer.memory[:] = np.random.default_rng(3).integers(0, POISON, len(peer.memory), dtype=np.uint8)
    near, far = scattered(700, 900, seed=5)
    sizes = np.full(700, 900, np.uint64)
    source[:] = POISON
    engine.read(peer.session, *places(source, peer, near, far), sizes)
    np.testing.assert_array_equal(source, expected(peer.memory, far, near, sizes)[:BYTES])


def test_nothing_to_write_needs_no_peer(engine):
    engine.write("127.0.0.1:1", [], [], [])
    engine.write("127.0.0.1:1", [1], [1], [0])


def test_a_peer_that_has_stopped_before_its_first_write_holds_up_no_other(engine, peer, start_peer, source):
    """Neither other transfers nor other threads; without a probe the former waited for it, 61 s (measured)."""
    stopped = start_peer()
    stopped.stand_still()
    engine.write(peer.session, [source.ctypes.data], [peer.address], [4096])
    place = [[source.ctypes.data], [stopped.address], [4096]]
    thread = threading.Thread(target=engine.write, args=(stopped.session, *place))
    try:
        thread.start()
        while not engine._peers[stopped.session].users:
            time.sleep(0.001)
        for _ in range(20):
            engine.write(peer.session, [source.ctypes.data], [peer.address], [4096])
            time.sleep(0.01)
        assert thread.is_alive(), "it waits for the stopped one, and nobody else does"
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    thread.join(LAND_SECONDS)
    assert not thread.is_alive()
    np.testing.assert_array_equal(stopped.memory[:4096], source[:4096])


def test_many_threads_to_one_peer_do_not_overflow_its_queue(engine, peer, source):
    """Natively, 8 threads with 512 descriptors each overflow it, and no later call to the peer succeeds."""
    peer.memory[:] = POISON
    near, far = scattered(8 * 600, 512, seed=11)
    sizes = np.full(len(near), 512, np.uint64)
    columns = [*places(source, peer, near, far), sizes]
    failures = []

    def write(thread):
        try:
            engine.write(peer.session, *(column[thread::8] for column in columns))
        except EngineError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    np.testing.assert_array_equal(peer.memory, expected(source, near, far, sizes))


@pytest.mark.parametrize("offset", [BYTES, BYTES - 32], ids=["outside", "across the end"])
def test_memory_that_the_peer_has_not_registered_is_refused(engine, peer, source, offset):
    peer.memory[:] = POISON
    with pytest.raises(EngineError, match="outside what it has registered") as raised:
        engine.write(peer.session, [source.ctypes.data], [peer.address + offset], [64])
    assert not raised.value.settled
    assert (peer.memory == POISON).all()
    # That call only.
    engine.write(peer.session, [source.ctypes.data], [peer.address], [64])
    np.testing.assert_array_equal(peer.memory[:64], source[:64])


def test_a_dead_peer_is_told_of_and_the_others_go_on(engine, peer, source, start_peer):
    dying = start_peer()
    engine.write(dying.session, [source.ctypes.data], [dying.address], [64])
    dying.process.kill()
    dying.process.wait()
    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(EngineError, match="nobody listens") as raised:
            engine.write(dying.session, [source.ctypes.data] * 600, [dying.address] * 600, [64] * 600)
        assert not raised.value.settled, "a firewall that refuses looks the same"
        assert time.monotonic() - start < TRANSFER_SECONDS
    engine.write(peer.session, [source.ctypes.data], [peer.address], [64])


def test_a_peer_that_was_never_there_is_told_of(engine, source):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        session = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EngineError, match="nobody listens") as raised:
            engine.write(session, [source.ctypes.data], [4096], [64])
    assert raised.value.settled, "nothing was begun"


def test_a_stopped_peer_leaves_a_write_in_doubt_until_all_of_it_has_landed(engine, source, start_peer):
    """What `settled` and `unfinished` are for. The peer then works again."""
    slow = start_peer()
    engine.write(slow.session, [source.ctypes.data], [slow.address], [64])
    slow.stand_still()
    near, far = scattered(600, 512)
    sizes = np.full(600, 512, np.uint64)
    ends = []
    ended = threading.Event()

    def end(settled):
        # Copied at this moment: what came later would be missing.
        ends.append((settled, slow.memory.copy()))
        ended.set()

    try:
        with pytest.raises(EngineError, match="has ended nowhere for 1 s") as raised:
            engine.write(slow.session, *places(source, slow, near, far), sizes)
        assert not raised.value.settled
        slow.memory[:] = POISON
        raised.value.unfinished.when_ended(end)
        assert not ended.wait(PATIENCE), "nothing is settled as long as the peer stands still"
    finally:
        slow.process.send_signal(signal.SIGCONT)
    assert ended.wait(LAND_SECONDS)
    ((settled, then),) = ends
    assert settled
    np.testing.assert_array_equal(then, expected(source, near[:256], far[:256], sizes[:256]))
    time.sleep(0.5)
    np.testing.assert_array_equal(slow.memory, then)
    engine.write(slow.session, *places(source, slow, near, far), sizes)
    np.testing.assert_array_equal(slow.memory, expected(source, near, far, sizes))


def test_what_is_under_way_when_an_engine_is_closed_lands_and_is_told(upstream, source, start_peer):
    slow = start_peer()
    engine = Mooncake(upstream, TCP, patience=LAND_SECONDS)
    engine.register([(source.ctypes.data, source.nbytes)])
    place = [source.ctypes.data], [slow.address], [BYTES]
    engine.write(slow.session, *place)
    slow.stand_still()
    raised, ends, ended = [], [], threading.Event()

    def write():
        with pytest.raises(EngineError, match="was closed during a write") as error:
            engine.write(slow.session, *place)
        raised.append(error.value)

    thread = threading.Thread(target=write)
    try:
        slow.memory[:] = POISON
        thread.start()
        deadline = time.monotonic() + LAND_SECONDS
        while not engine._peers[slow.session].users:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        engine.close()
        thread.join(LAND_SECONDS)
        (error,) = raised
        assert not error.settled
        error.unfinished.when_ended(lambda settled: (ends.append((settled, slow.memory[:BYTES].copy())), ended.set()))
        assert not ends
    finally:
        slow.process.send_signal(signal.SIGCONT)
    assert ended.wait(LAND_SECONDS)
    ((settled, then),) = ends
    assert settled
    np.testing.assert_array_equal(then, source)


def test_a_stopped_peer_takes_no_more_than_its_queue(upstream, source, start_peer):
    slow = start_peer()
    engine = Mooncake(upstream, Limits(descriptors=4, outstanding=5, asks=True), patience=0.2)
    engine.register([(source.ctypes.data, source.nbytes)])
    place = [source.ctypes.data] * 8, [slow.address] * 8, [64] * 8
    engine.write(slow.session, *place)
    slow.stand_still()
    try:
        raised = []
        for _ in range(3):
            with pytest.raises(EngineError) as error:
                engine.write(slow.session, *place)
            raised.append(error.value.settled)
        assert raised == [False, False, True], "4, then 1, then there is no room: nothing was begun"
    finally:
        slow.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + LAND_SECONDS
    while True:
        try:
            engine.write(slow.session, *place)
            break
        except EngineError:
            assert time.monotonic() < deadline
    engine.close()


def test_overlapping_registration_is_refused_with_the_remedy(engine, source):
    with pytest.raises(EngineError, match=r"code -7\).*register every allocation once") as raised:
        engine.register([(source.ctypes.data + 4096, 4096)])
    assert raised.value.settled


def test_close_gives_back_what_it_registered_and_ends(upstream, source):
    engine = Mooncake(upstream, TCP)
    for _ in range(2):
        engine.register([(source.ctypes.data, 4096), (source.ctypes.data + 8192, 4096)])
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            engine.write("127.0.0.1:1", [1], [1], [1])
        engine = Mooncake(upstream, TCP)


@pytest.mark.parametrize(
    ("environ", "devices", "limits"),
    [
        ({}, False, TCP),
        ({}, True, OTHER),
        ({"MC_FORCE_TCP": "0"}, True, TCP),
        ({"MOONCAKE_PROTOCOL": "tcp"}, True, TCP),
        ({"MOONCAKE_PROTOCOL": "efa"}, False, OTHER),
        ({"ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE": "true"}, False, OTHER),
        ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "100"}, False, Limits(100, 100, asks=True)),
        ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "60000"}, False, TCP),
        ({"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "many"}, False, TCP),
        ({"MC_TCP_PROTO": "1"}, True, OTHER),
    ],
)
def test_limits_follow_the_transport(tmp_path, environ, devices, limits):
    if devices:
        (tmp_path / "mlx5_0").mkdir()
    assert limits_for(environ, rdma_devices=tmp_path) == limits


def test_tcp_without_acknowledgements_is_refused(tmp_path):
    with pytest.raises(EngineError, match="unset MC_TCP_PROTO"):
        limits_for({"MC_TCP_PROTO": "1", "MC_FORCE_TCP": "1"}, rdma_devices=tmp_path)


@pytest.mark.parametrize("session", ["", ":9", "nonsense", "host:npu_0", "127.0.0.1:99999", "a:b:12:npu_1:77"])
def test_a_session_of_another_form_is_not_called_gone(session):
    assert not refuses_connections(session)
