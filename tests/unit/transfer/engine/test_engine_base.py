"""Checking and cutting a batch, the same for all engines; what the wrappers make of a native engine's codes."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hetero.errors import HeteroError
from sglang_hetero.transfer.engine import EngineError
from sglang_hetero.transfer.engine.base import check_batch, check_regions, split
from sglang_hetero.transfer.engine.memfabric import MemFabric
from sglang_hetero.transfer.engine.mooncake import Mooncake
from sglang_hetero.transfer.engine.native import Limits

NOBODY = "127.0.0.1:1"


def every_byte(batches):
    """(local, remote) of each byte, sorted."""
    return sorted(
        (int(local) + byte, int(remote) + byte)
        for batch in batches
        for local, remote, size in zip(batch.local, batch.remote, batch.sizes, strict=True)
        for byte in range(int(size))
    )


sizes_lists = st.lists(st.integers(0, 40), max_size=30)


@given(
    sizes=sizes_lists,
    descriptors=st.integers(1, 8),
    max_bytes=st.none() | st.integers(1, 50),
    first=st.none() | st.just(1),
)
def test_slices_hold_every_byte_once_within_the_limits(sizes, descriptors, max_bytes, first):
    batch = check_batch([1000 * index + 1 for index in range(len(sizes))], range(1, len(sizes) + 1), sizes)
    parts = list(split(batch, descriptors=descriptors, max_bytes=max_bytes, first=first))
    assert every_byte(parts) == every_byte([batch])
    assert all(1 <= len(part) <= descriptors for part in parts)
    assert all(part.total_bytes <= (max_bytes or sum(sizes)) for part in parts)
    assert not first or not parts or len(parts[0]) == 1
    if max_bytes is None and not first:
        assert len(parts) == -(-len(batch) // descriptors)


def test_addresses_and_sizes_keep_64_bits():
    batch = check_batch([2**63 + 5], [2**64 - 2**33], [2**33])
    (part,) = split(batch, descriptors=1)
    assert (int(part.local[0]), int(part.remote[0]), part.total_bytes) == (2**63 + 5, 2**64 - 2**33, 2**33)
    cut = list(split(batch, descriptors=1, max_bytes=2**32))
    assert [int(part.remote[0]) for part in cut] == [2**64 - 2**33, 2**64 - 2**32]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (([1], [1, 2], [1]), r"\[1, 2, 1\]"),
        (([1], [1], [-1]), "negative number -1"),
        (([1.5], [1], [1]), "float64"),
        (([[1]], [[1]], [[1]]), r"shape \(1, 1\)"),
        (([2**64 - 8], [1], [9]), "pass the end of memory"),
        (([1], [2**64 - 8], [9]), "remote address"),
        (([1], [1], [2**64]), "one-dimensional array of uint64"),
    ],
)
def test_what_is_no_batch_is_refused_before_anything_moves(columns, text):
    with pytest.raises(EngineError, match=text) as raised:
        check_batch(*columns)
    assert raised.value.settled
    assert isinstance(raised.value, HeteroError)


def test_empty_descriptors_are_dropped():
    batch = check_batch([1, 2, 3], [4, 5, 6], [0, 7, 0])
    assert every_byte([batch]) == [(2 + byte, 5 + byte) for byte in range(7)]


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ([], "empty"),
        ([(4096, 0)], "0 bytes at address 0x1000"),
        ([(0, 10)], "10 bytes at address 0x0"),
        ([(2**64 - 1, 2)], "cannot be registered"),
        ([(8192, 10), (4096, 4097)], "overlaps the one before it, which ends at 0x2001"),
    ],
)
def test_regions_that_no_engine_takes_are_refused(regions, text):
    with pytest.raises(EngineError, match=text):
        check_regions(regions)


def test_regions_that_touch_keep_their_order():
    assert check_regions([(8192, 10), (4096, 4096)]) == ([8192, 4096], [10, 4096])


class Native:
    """A native engine that answers `code`, or raises it, and records its calls. Each peer answers a probe."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def send_probe(self, _):
        return 0

    def __getattr__(self, name):
        def method(*arguments):
            self.calls.append((name, *arguments))
            if isinstance(self.code, Exception):
                raise self.code
            return self.code

        return method


def wrap(kind, native, limits=None):
    limits = limits or Limits(descriptors=4, outstanding=8)
    return kind(SimpleNamespace(engine=native, session_id="here:1"), limits)


kinds = pytest.mark.parametrize("kind", [Mooncake, MemFabric])


@kinds
def test_regions_are_registered_in_one_batch(kind):
    native = Native()
    engine = wrap(kind, native)
    engine.register([(4096, 100), (8192, 200)])
    assert native.calls == [("batch_register_memory", [4096, 8192], [100, 200])]
    assert engine.session == "here:1"


@kinds
@pytest.mark.parametrize("code", [-1, 7, None, TypeError("no such overload")], ids=str)
def test_a_refused_registration_raises_with_a_remedy(kind, code):
    with pytest.raises(EngineError, match=r"refused to register 1 regions, 100 bytes \(code .*\); .{20}"):
        wrap(kind, Native(code)).register([(4096, 100)])


@kinds
@pytest.mark.parametrize("operation", ["write", "read"])
def test_calls_have_python_integers_and_stay_below_the_limit(kind, operation):
    native = Native()
    getattr(wrap(kind, native), operation)("there:2", np.arange(1, 11), np.arange(11, 21), np.full(10, 3))
    assert {name for name, *_ in native.calls} == {f"batch_transfer_sync_{operation}"}
    assert [call[2] for call in native.calls] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [call[3] for call in native.calls] == [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20]]
    assert all(type(word) is int for call in native.calls for column in call[2:] for word in column)


@kinds
@pytest.mark.parametrize("code", [-1, 1, None, RuntimeError("lost")], ids=str)
def test_a_failed_call_is_in_doubt_ends_its_batch_and_nothing_else(kind, code):
    native = Native(code)
    engine = wrap(kind, native)
    with pytest.raises(EngineError, match="4 descriptors, 12 bytes, peer odd; ") as raised:
        engine.write("odd", np.arange(1, 11), np.arange(11, 21), np.full(10, 3))
    assert not raised.value.settled
    assert len(native.calls) == 1
    # The peer is tried with one descriptor, then trusted again.
    native.code, native.calls = 0, []
    for _ in range(2):
        engine.write("odd", np.arange(1, 9), np.arange(11, 19), np.full(8, 3))
    assert [len(call[2]) for call in native.calls] == [1, 4, 3, 4, 4]


@kinds
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_refusal_by_the_host_settles_nothing(kind, operation):
    """It says that nobody listens, and nothing about a connection that is there: the rest may be moving."""
    with pytest.raises(EngineError) as raised:
        getattr(wrap(kind, Native(-1)), operation)(NOBODY, [1], [1], [1])
    assert not raised.value.settled and raised.value.unfinished is None


def test_who_listens_at_a_session():
    """MemFabric need not listen on the port of its session."""
    engines = [wrap(kind, Native()) for kind in (Mooncake, MemFabric)]
    assert [engine.sees_ends for engine in engines] == [True, False]
    assert [engine.peer_gone(NOBODY) for engine in engines] == [True, False]


def test_descriptors_under_way_to_one_peer_are_bounded_over_all_threads():
    lock, open_gate = threading.Lock(), threading.Event()
    under_way, peak, others = 0, 0, threading.Event()

    def transfer(session, local, remote, sizes):
        nonlocal under_way, peak
        if session == "other":
            others.set()
            return 0
        with lock:
            under_way += len(local)
            peak = max(peak, under_way)
        open_gate.wait(5)
        with lock:
            under_way -= len(local)
        return 0

    engine = wrap(Mooncake, SimpleNamespace(batch_transfer_sync_write=transfer))
    columns = (np.arange(1, 11), np.arange(1, 11), np.full(10, 1))
    threads = [threading.Thread(target=engine.write, args=("slow", *columns)) for _ in range(5)]
    for thread in threads:
        thread.start()
    # Another peer does not wait for the slow one.
    engine.write("other", *columns)
    assert others.is_set()
    open_gate.set()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert (under_way, peak) == (0, 8)


@kinds
def test_close_unregisters_once(kind):
    native = Native()
    engine = wrap(kind, native)
    engine.register([(4096, 100), (8192, 200)])
    native.calls = []
    engine.close()
    engine.close()
    unregistered = [call[1:] for call in native.calls]
    assert unregistered in ([([4096, 8192],)], [(4096,), (8192,)])
    for use in (lambda: engine.write("a", [1], [1], [1]), lambda: engine.register([(1, 1)])):
        with pytest.raises(EngineError, match="closed"):
            use()
