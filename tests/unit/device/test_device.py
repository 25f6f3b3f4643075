"""The one module that asks what kind of device it is, with a stand-in for torch's device module."""

import ast
import contextlib
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import FREE, PRESENT, TOTAL, FakeModule

from sglang_hetero import device as devices
from sglang_hetero.device import ForwardLane, HostCopy, Lane, memory_info, numbered, on_device, properties
from sglang_hetero.transfer.follower import Follower
from sglang_hetero.transfer.merger import MergeWorker
from sglang_hetero.transfer.mover import Mover
from sglang_hetero.transfer.puller import Puller

PACKAGE = Path(devices.__file__).parent
SECONDS = 20.0
CPU = torch.device("cpu")
KINDS = [torch.device("cuda", 1), torch.device("privateuseone", 1)]
"""torch_npu gives the second one the name npu."""


@pytest.fixture
def module(monkeypatch):
    fake = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def test_a_cpu_needs_no_module(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: pytest.fail("a CPU has no device module to ask"))
    on_device(CPU)
    assert properties(CPU) is None
    free, total = memory_info(CPU)
    assert 0 < free <= total
    with Lane(CPU).active(), ForwardLane(CPU).active():
        pass
    assert ForwardLane(CPU).immediate and ForwardLane(CPU).done()()
    values = torch.tensor([[3], [5]], dtype=torch.int32)
    copy = HostCopy(values)
    values.fill_(7)  # the scheduler goes on: its table of pages is another one soon
    assert copy.ready() and copy.array().tolist() == [3, 5]
    assert devices.to_device(np.arange(3), CPU).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_device_is_asked_through_its_module(module, kind):
    on_device(kind)
    assert memory_info(kind) == (FREE, TOTAL)
    assert properties(kind).vector_core_num == 40
    assert [what for _, what in module.calls] == [("set_device", 1), ("mem_get_info", 1)]


@pytest.mark.parametrize("kind", ["cuda", "privateuseone"])
def test_a_device_without_a_number_is_the_present_threads(module, kind):
    """SGLang's pools have none: a thread of ours that takes no number would work on device 0."""
    assert numbered(torch.device(kind)) == torch.device(kind, PRESENT)
    assert numbered(torch.device(kind, 0)) == torch.device(kind, 0)
    assert numbered(CPU) == CPU
    with pytest.raises(ValueError, match="has no number"):
        on_device(torch.device(kind))
    assert not module.calls


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_lane_is_one_stream_and_is_complete_when_it_is_left(module, kind):
    lane = Lane(kind)
    streams = []
    for raises in (False, True, False):
        with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext(), lane.active():
            streams.append(module.current_stream())
            module.pending.add(streams[-1])
            if raises:
                raise ZeroDivisionError
        assert not module.pending, "what was enqueued may still be copied"
        assert module.current_stream() is None
    assert streams[0] is not None and len(set(streams)) == 1
    assert [what for _, what in module.calls if what[0] == "Stream"] == [("Stream", 1)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_work_between_forward_passes_is_done_when_their_stream_says_so(module, kind):
    stream = module.Stream(device=kind)
    lane = ForwardLane(kind, stream)
    assert not lane.immediate
    with lane.active():
        assert module.current_stream() is stream
    done = lane.done()
    assert not done()
    stream.synchronize()
    assert done()


def test_without_a_stream_the_current_one_is_meant(module):
    lane = ForwardLane(KINDS[0])
    other = module.Stream(device=KINDS[0])
    with module.stream(other):
        with lane.active():
            assert module.current_stream() is other
        done = lane.done()
    assert not done()
    other.synchronize()
    assert done()


def test_a_copy_to_the_host_is_ready_when_its_stream_says_so(module, monkeypatch):
    stream = module.Stream(device=KINDS[1])
    host = torch.zeros(2, 1, dtype=torch.int32)
    asked = []

    def empty(shape, *, dtype, pin_memory):
        asked.append((tuple(shape), dtype, pin_memory))
        return host

    monkeypatch.setattr(torch, "empty", empty)
    there = type("OnDevice", (), {"device": KINDS[1], "shape": torch.Size((2, 1)), "dtype": torch.int32})()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, values, *, non_blocking: asked.append(non_blocking))
    with module.stream(stream):
        copy = HostCopy(there)
    assert asked == [((2, 1), torch.int32, True), True]
    assert not copy.ready()
    kept = weakref.ref(there)
    del there
    assert kept() is not None, "the device still reads it"
    host.fill_(7)
    stream.synchronize()
    assert copy.ready() and copy.array().tolist() == [7, 7]


def test_an_array_goes_to_a_device_from_pinned_memory_without_waiting(monkeypatch):
    """From other memory a device may read after whoever made the array has written to it again."""
    asked = []

    class Host:
        def pin_memory(self):
            asked.append("pinned")
            return self

        def to(self, device, *, non_blocking=False):
            asked.append((device, non_blocking))
            return "there"

    monkeypatch.setattr(torch, "from_numpy", lambda values: Host())
    assert devices.to_device(np.arange(3), KINDS[1]) == "there"
    assert asked == ["pinned", (KINDS[1], True)]


def test_an_npu_is_known_to_torch_when_its_package_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    for kind in ("cpu", "cuda"):
        devices.attach(kind)
    with pytest.raises(ImportError):
        devices.attach("npu")


# --- threads ---------------------------------------------------------------------------------------------------------


class Read:
    """An engine, and of a request what a reader asks."""

    def __init__(self, module):
        self.module = module
        self.source_set = SimpleNamespace(sessions=["a"], sources=[SimpleNamespace(label="prefill")])

    def read(self, *_):
        self.module.note("work")


def _mover(module, device):
    def turn(destination):
        module.note("work")
        mover.stop()
        return False

    mover = Mover("test", turn, device)
    mover.wake(SimpleNamespace(untaken=1, room=1, peer=SimpleNamespace(label="decode")))
    mover.worker.thread.join(SECONDS)
    return mover.worker.thread.name


def _merger(module, device):
    def merge_batch(inbox, batch):
        module.note("work")
        merger.stop()

    merger = MergeWorker("test", merge_batch, lambda *_: None, device)
    merger.put(SimpleNamespace(room=1), "piece")
    merger.worker.thread.join(SECONDS)
    return merger.worker.thread.name


def _reader(module, device):
    with ThreadPoolExecutor(1, thread_name_prefix="test-reader") as executor:
        inbox, ended = Read(module), []
        puller = Puller(inbox, executor, device)
        begun = puller.start(inbox, [(0, None, None, None)] * 2, lambda *outcome: ended.append(outcome[2].problem))
    assert begun == (2, "") and ended == ["", ""]
    return "test-reader_0"


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("thread", [_mover, _merger, _reader])
def test_a_thread_takes_its_device_before_it_works(module, thread, kind):
    seen = module.of(thread(module, kind))
    assert seen[:2] == [("set_device", 1), "work"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_follower_begins_with_its_device(module, kind):
    follower = Follower("test", SimpleNamespace(), tells_end=True, device=kind)
    follower.stop()
    follower.worker.thread.join(SECONDS)
    assert module.of(follower.worker.thread.name) == [("set_device", 1)]


def test_a_reader_that_cannot_have_its_device_says_so(module, monkeypatch):
    monkeypatch.setattr(module, "set_device", lambda device: 1 / 0, raising=False)
    ended = []
    with ThreadPoolExecutor(1) as executor:
        inbox = Read(module)
        Puller(inbox, executor, KINDS[0]).start(inbox, [(0, None, None, None)], lambda *told: ended.append(told[2]))
    assert len(ended) == 1 and "ZeroDivisionError" in ended[0].problem
    assert not module.of("work")


TAKE_THEIR_DEVICE = {
    ("transfer/follower.py", "Worker"),
    ("transfer/merger.py", "Worker"),
    ("transfer/mover.py", "Worker"),
    ("transfer/reception.py", "ThreadPoolExecutor"),  # whose only user is the Puller
}
TOUCH_NONE = {
    ("backend/announcer.py", "Worker"): "messages",
    ("backend/background.py", "Thread"): "requests over HTTP",
    ("backend/doubts.py", "Worker"): "sockets and processes",
    ("backend/liveness.py", "Worker"): "sockets",
    ("backend/rank_told.py", "Thread"): "writes a file",
    ("backend/watch.py", "Worker"): "figures of this process",
    ("discovery/members.py", "Worker"): "etcd",
    ("discovery/registrar.py", "Worker"): "etcd",
    ("perf/spans.py", "Thread"): "writes a file",
    ("transfer/control/client.py", "Thread"): "messages",
    ("transfer/control/service.py", "Thread"): "messages",
    ("transfer/engine/asked.py", "Thread"): "asks Mooncake for the state of writes over TCP, which are on its threads",
    ("transfer/worker.py", "Thread"): "what the others are made of",
}
SERVER_SIDE = ("backend", "transfer", "discovery", "perf", "merge", "layout", "reshard")
MAKERS = ("Thread", "Worker", "ThreadPoolExecutor")


def test_every_thread_of_a_server_is_known():
    """A new one belongs into one of the two lists above: it takes its device, or touches none and this says why."""
    found = set()
    for folder in SERVER_SIDE:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name in MAKERS:
                        found.add((str(path.relative_to(PACKAGE)), name))
    assert found == TAKE_THEIR_DEVICE | set(TOUCH_NONE)


def test_nobody_else_asks_a_vendor():
    """cpu/ puts SGLang on CPUs: it names what it replaces there."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if path != PACKAGE / "device.py" and place.parts[0] != "cpu":
            found += [f"{place}:{node.lineno}" for node in ast.walk(ast.parse(path.read_text())) if _asks(node)]
    assert not found


def _asks(node):
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any(
            "torch_npu" in text for text in (getattr(node, "module", None) or "", *(one.name for one in node.names))
        )
    vendors = ("cuda", "npu", "get_device_module", "accelerator")
    of_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    return (of_torch and node.attr in vendors) or (isinstance(node, ast.Attribute) and node.attr == "pin_memory")
