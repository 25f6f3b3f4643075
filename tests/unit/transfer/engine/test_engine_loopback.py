"""The loopback engine: exact bytes, no access outside what is registered, and faults exactly as scripted."""

import threading
import time

import numpy as np
import pytest

from sglang_hetero.transfer.engine import EngineError
from sglang_hetero.transfer.engine.loopback import Fabric, Fault, Gate, LoopbackEngine, Operation, region_of

POISON = 0xFF
SIZE = 64
COUNT = 8
GUARD = 32


class Pair:
    """`here` writes to and reads from `there`, whose registered memory has unregistered neighbours."""

    def __init__(self, **options):
        self.fabric = Fabric()
        self.here = LoopbackEngine("here", self.fabric, **options)
        self.there = LoopbackEngine("there", self.fabric)
        self.near = np.arange(COUNT * SIZE, dtype=np.uint8) % 251
        self.far = np.full(COUNT * SIZE + 2 * GUARD, POISON, np.uint8)
        self.target = self.far[GUARD:-GUARD]
        self.here.register([region_of(self.near)])
        self.there.register([region_of(self.target)])

    def columns(self, indices=range(COUNT)):
        offsets = np.array(indices, np.uint64) * np.uint64(SIZE)
        local, remote = (offsets + np.uint64(array.ctypes.data) for array in (self.near, self.target))
        return local, remote, np.full(len(offsets), SIZE, np.uint64)

    def write(self, indices=range(COUNT)):
        self.here.write("there", *self.columns(indices))

    def landed(self):
        """Indices whose bytes are there; all else must be poison."""
        rows, wanted = self.target.reshape(COUNT, SIZE), self.near.reshape(COUNT, SIZE)
        done = [index for index in range(COUNT) if (rows[index] == wanted[index]).all()]
        assert all((rows[index] == POISON).all() for index in range(COUNT) if index not in done)
        assert (self.far[:GUARD] == POISON).all()
        assert (self.far[-GUARD:] == POISON).all()
        return done


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    assert pair.here.script.unused == 0


def start(function, *arguments):
    """A thread, and the list that gets its exception."""
    raised = []

    def run():
        try:
            function(*arguments)
        except EngineError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_write_and_read_move_exactly_these_bytes(pair):
    pair.write([1, 6])
    assert pair.landed() == [1, 6]
    pair.target[:] = 7
    pair.here.read("there", *pair.columns([3]))
    assert (pair.near.reshape(COUNT, SIZE)[3] == 7).all()
    assert (pair.near.reshape(COUNT, SIZE)[[2, 4]] != 7).any(axis=1).all()
    assert [call.operation for call in pair.here.script.calls] == [Operation.WRITE, Operation.READ]
    assert pair.fabric.violations == []


@pytest.mark.parametrize("shift", [-1, GUARD - 1, COUNT * SIZE], ids=["before", "across the end", "behind"])
def test_a_write_outside_registered_memory_moves_nothing_and_is_kept_in_mind(pair, shift):
    local, remote, sizes = pair.columns()
    remote[-1] = pair.target.ctypes.data + (COUNT - 1) * SIZE + shift if shift >= 0 else pair.target.ctypes.data + shift
    with pytest.raises(EngineError, match="there has not registered") as raised:
        pair.here.write("there", local, remote, sizes)
    assert raised.value.settled
    assert pair.landed() == []
    assert len(pair.fabric.violations) == 1


def test_local_memory_must_be_registered_too(pair):
    local, remote, sizes = pair.columns()
    with pytest.raises(EngineError, match="here has not registered"):
        pair.here.write("there", local + np.uint64(1), remote, sizes)


def test_a_region_does_not_reach_into_its_neighbour(pair):
    """Two regions side by side are two registrations: a descriptor across both is refused, as the engines do."""
    other = np.zeros(2 * SIZE, np.uint8)
    start_of, _ = region_of(other)
    pair.there.register([(start_of, SIZE), (start_of + SIZE, SIZE)])
    pair.here.write("there", [pair.near.ctypes.data], [start_of + SIZE], [SIZE])
    with pytest.raises(EngineError, match="has not registered"):
        pair.here.write("there", [pair.near.ctypes.data], [start_of + SIZE - 1], [SIZE])
    with pytest.raises(EngineError, match="overlaps"):
        pair.there.register([(start_of + SIZE, 1)])


def test_a_peer_that_left_is_gone(pair):
    pair.there.close()
    with pytest.raises(EngineError, match="no session there") as raised:
        pair.write()
    assert raised.value.settled
    assert pair.here.peer_gone("there")
    pair.there.close()
    LoopbackEngine("there", pair.fabric)


def test_an_engine_that_left_can_do_nothing(pair):
    pair.here.close()
    with pytest.raises(EngineError, match="no session here"):
        pair.write()
    assert not pair.here.peer_gone("there")
    with pytest.raises(EngineError, match="session there already"):
        LoopbackEngine("there", pair.fabric)


@pytest.mark.parametrize(("lands", "expected"), [(None, 0), (0, 0), (3, 3), (COUNT, COUNT)])
def test_a_call_fails_with_and_without_bytes_landing(pair, lands, expected):
    pair.here.script.next(Fault(error="reset", lands=lands))
    with pytest.raises(EngineError, match=r"reset.*8 descriptors, 512 bytes, peer there") as raised:
        pair.write()
    assert raised.value.settled
    assert pair.landed() == list(range(expected))
    pair.write()
    assert pair.landed() == list(range(COUNT))


def test_descriptors_of_a_batch_come_in_another_order_the_same_each_time():
    orders = []
    for _ in range(2):
        pair = Pair()
        pair.here.script.next(Fault(shuffle=5, lands=3))
        pair.write()
        orders.append(pair.landed())
    assert orders[0] == orders[1] != [0, 1, 2]
    assert len(orders[0]) == 3


def test_a_later_batch_overtakes_one_at_its_gate(pair):
    gate = Gate()
    pair.here.script.next(Fault(gate=gate))
    thread, raised = start(pair.write, [0, 1])
    assert gate.wait_reached()
    pair.write([2])
    assert pair.landed() == [2]
    gate.open()
    thread.join()
    assert not raised
    assert pair.landed() == [0, 1, 2]


def test_a_call_returns_late(pair):
    gate = Gate()
    pair.here.script.next(Fault(gate_after=gate))
    thread, _ = start(pair.write, [4])
    assert gate.wait_reached()
    assert pair.landed() == [4]
    assert thread.is_alive()
    gate.open()
    thread.join()


def test_a_call_at_its_gate_when_the_peer_leaves_touches_nothing(pair):
    gate = Gate()
    pair.here.script.next(Fault(gate=gate))
    thread, raised = start(pair.write)
    assert gate.wait_reached()
    pair.there.close()
    gate.open()
    thread.join()
    assert "no session there" in str(raised[0])
    assert pair.landed() == []


def test_a_write_in_doubt_lands_after_the_failure_with_its_bytes_of_then(pair):
    pair.here.script.next(Fault(error="timeout", late=True))
    with pytest.raises(EngineError) as raised:
        pair.write([1])
    assert not raised.value.settled
    wanted = pair.near.copy()
    pair.near[:] = 0
    assert (pair.target == POISON).all()
    assert pair.here.script.late == 1
    pair.here.script.land_late()
    np.testing.assert_array_equal(pair.target[SIZE : 2 * SIZE], wanted[SIZE : 2 * SIZE])
    assert pair.here.script.late == 0


def test_a_write_that_succeeded_lands_once_more(pair):
    pair.here.script.next(Fault(late=True))
    pair.write([1])
    pair.target[:] = POISON
    pair.here.script.land_late()
    assert pair.landed() == [1]


def test_late_bytes_land_in_any_order_and_never_at_a_peer_that_left(pair):
    pair.here.script.next(Fault(error="timeout", late=True), times=3)
    for index in range(3):
        with pytest.raises(EngineError):
            pair.write([index])
    pair.here.script.land_late(2)
    assert pair.landed() == [2]
    pair.here.script.land_late(0)
    assert pair.landed() == [0, 2]
    pair.there.close()
    pair.here.script.land_late()
    assert pair.landed() == [0, 2]


def test_faults_meet_the_calls_they_are_for(pair):
    LoopbackEngine("third", pair.fabric).register([region_of(pair.target)])
    script = pair.here.script
    script.next(Fault(error="third's"), session="third")
    script.next(Fault(error="a read's"), operation=Operation.READ)
    pair.write()
    with pytest.raises(EngineError, match="a read's"):
        pair.here.read("there", *pair.columns())
    with pytest.raises(EngineError, match="third's"):
        pair.here.write("third", *pair.columns())
    script.always(Fault(error="always", settled=False))
    for _ in range(2):
        with pytest.raises(EngineError, match="always") as raised:
            pair.write()
        assert not raised.value.settled
    script.always(None)
    pair.write()


def test_delay(pair):
    pair.here.script.next(Fault(delay=0.05))
    begun = time.monotonic()
    pair.write()
    assert time.monotonic() - begun >= 0.05


def test_sliced_batches_fail_between_slices():
    pair = Pair(slice_descriptors=3)
    pair.here.script.next(Fault(), Fault(error="reset", lands=1))
    with pytest.raises(EngineError):
        pair.write()
    assert pair.landed() == [0, 1, 2, 3]
    assert [call.descriptors for call in pair.here.script.calls] == [3, 3]


def test_many_threads(pair):
    threads = [start(pair.write, [index])[0] for index in range(COUNT) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert pair.landed() == list(range(COUNT))
    assert len(pair.here.script.calls) == 4 * COUNT
