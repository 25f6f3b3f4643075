"""A host on which no kernel can be built: the same bytes by strided copies, and one line in the log."""

import logging
from functools import partial

import pytest
import torch
from support import interpreted_kernels
from test_merge_batch import MODEL, path

from sglang_hetero.errors import MergeError
from sglang_hetero.layout import Role
from sglang_hetero.merge import batch, kernels, naive, ops, triton_batch, triton_ops
from sglang_hetero.merge.kernels import Kernels, NoKernel
from tests.reshard_oracle.handover import Request, serve
from tests.reshard_oracle.model import latent_kv
from tests.reshard_oracle.rank import CHANNELS_FIRST, WINDOW_FIRST, Format, Shape

WHY = "bishengir-compile: not found"
SAID = "the merge's kernels cannot be built here"
BUILD_FAILS = {"copy_tiles", "copy_blocks"}


class Broken:
    """Stands for the module of the kernels. after: so many starts succeed before one fails."""

    def __init__(self, after=0):
        self.real, self.starts, self.after = interpreted_kernels(), 0, after
        self.FIELDS = self.real.FIELDS

    def __getattr__(self, name):
        if name not in BUILD_FAILS:
            raise AttributeError(name)
        return self

    def __getitem__(self, grid):
        return partial(self.start, grid)

    def start(self, grid, *arguments, **figures):
        self.starts += 1
        if self.starts > self.after:
            raise RuntimeError(WHY)
        self.real.copy_tiles[grid](*arguments, **figures)


class Unbuildable(Broken):
    """Its kernels fail because they cannot be built."""

    def warmup(self, *_, grid, **__):
        raise RuntimeError(WHY)


class Unloadable(Broken):
    """They can be built, and the device does not take the result."""

    def warmup(self, *_, grid, **__):
        return self

    def _init_handles(self):
        raise RuntimeError(WHY)


class Unstartable(Unloadable):
    """Nothing is wrong with the kernels: another reason keeps one from being started."""

    def _init_handles(self):
        pass


@pytest.fixture
def here(monkeypatch):
    """This process's kernels, none of which has failed yet."""
    made = Kernels()
    for module in (kernels, batch, ops):
        monkeypatch.setattr(module, "KERNELS", made)
    return made


def said(caplog):
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


OPAQUE = (latent_kv(Role.TARGET_LATENT, {"latent": 4}, (0, 1)),)
WORLDS = {
    "channels-first": (MODEL, {Role.CONV: CHANNELS_FIRST}, {Role.CONV: CHANNELS_FIRST}),
    "window-first": (MODEL, {Role.CONV: WINDOW_FIRST}, {Role.CONV: WINDOW_FIRST}),
    "from channels-first to window-first": (MODEL, {Role.CONV: CHANNELS_FIRST}, {Role.CONV: WINDOW_FIRST}),
    "opaque pages": (OPAQUE, *({Role.TARGET_LATENT: Format(encoding="packed-rows")},) * 2),
}


@pytest.mark.parametrize("kind", [Unbuildable, Unloadable])
@pytest.mark.parametrize("after", [0, 1], ids=["none-can-be-built", "the-second-cannot"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 3)], ids=lambda tp: f"P{tp[0]}D{tp[1]}")
def test_batches_come_out_right_and_one_line_says_why(here, caplog, *, world, tp, after, kind):
    caplog.set_level(logging.WARNING)
    model, source, destination = WORLDS[world]
    with path("kernel"), pytest.MonkeyPatch.context() as monkeypatch:
        unbuildable = kind(after)
        monkeypatch.setattr(triton_batch, "triton_kernels", unbuildable)
        monkeypatch.setattr(batch, "_on_cpu", partial(batch.by_kernels, triton_batch.Launcher(2)))
        for tokens in (7, 9):  # `serve` compares every byte of every destination
            shapes = (Shape(page_size=4, formats=formats) for formats in (source, destination))
            serve(model, *zip(tp, shapes, strict=True), Request(tokens))
    assert not here.usable
    assert unbuildable.starts == after + 1, "one failure is enough"
    assert len(said(caplog)) == 1 and WHY in said(caplog)[0] and "RuntimeError" in said(caplog)[0]


def test_an_operation_comes_out_right(here, monkeypatch, caplog):
    monkeypatch.setattr(triton_ops, "triton_kernels", Unbuildable())
    monkeypatch.setattr(ops, "cpu", _Device())
    pool = torch.arange(2 * 5 * 4 * 3 * 8, dtype=torch.int16).view(2, 5, 4, 3, 8)
    out, expected = (torch.full((2, 2, 4, 2, 8), -1, dtype=torch.int16) for _ in range(2))
    pages = torch.tensor([3, 1])
    for _ in range(2):
        ops.pack_kv(out, pool, pages, 1, 7)
    naive.pack_kv(expected, pool, pages, 1, 7)
    assert torch.equal(out, expected) and (out[:, 1, 3] == -1).all()
    assert len(said(caplog)) == 1


class _Device:
    """Takes the operations for the CPU the way of those for a device."""

    def __getattr__(self, operation):
        def run(target, *arguments):
            from sglang_hetero.merge.ops import KERNELS, by_kernels

            copies = partial(getattr(naive, operation), target, *arguments)
            KERNELS.attempt(partial(by_kernels, operation, target, *arguments), copies)

        return run


def test_what_is_wrong_with_a_request_is_no_fault_of_the_kernels(here, caplog):
    """A refusal stays a refusal: nothing is copied, and the next request has kernels."""

    def refuses():
        raise MergeError("too many tiles")

    with pytest.raises(MergeError):
        here.attempt(refuses, lambda: pytest.fail("copied what was refused"))
    assert here.usable and not said(caplog)


def test_without_triton_there_are_copies_from_the_start(here, monkeypatch, caplog):
    def missing():
        raise ImportError("No module named 'triton'")

    done = []
    here.attempt(missing, lambda: done.append(1))
    here.attempt(lambda: pytest.fail("tried again"), lambda: done.append(2))
    assert done == [1, 2]
    assert len(said(caplog)) == 1 and "No module named 'triton'" in said(caplog)[0]
    monkeypatch.setattr(triton_batch, "Launcher", None)
    monkeypatch.delattr(triton_batch, "Launcher")
    assert batch._launcher() is None


def test_a_start_that_fails_for_another_reason_costs_its_batch_only(here, monkeypatch, caplog):
    """A device that is out of memory, say: copies would hide it, and no later batch would have kernels."""
    launcher = triton_batch.Launcher(2)
    broken = Unstartable()
    shapes = [Shape(page_size=4, formats={Role.CONV: CHANNELS_FIRST}) for _ in range(2)]
    with path("kernel"), pytest.MonkeyPatch.context() as inner:
        inner.setattr(triton_batch, "triton_kernels", broken)
        inner.setattr(batch, "_on_cpu", partial(batch.by_kernels, launcher))
        inner.setattr(batch, "copy_strided", lambda *_: pytest.fail("copied"))
        with pytest.raises(RuntimeError, match=WHY):
            serve(MODEL, *zip((2, 1), shapes, strict=True), Request(7))
    assert here.usable and broken.starts == 1 and not said(caplog)


def test_what_a_kernel_raises_is_kept_as_the_cause():
    """Not what its second build raises: of triton-ascend that may be no more than that it has failed before."""

    class Kernel:
        def __getitem__(self, _):
            return self.start

        def start(self, *_, **__):
            raise OSError(WHY)

        def warmup(self, *_, **__):
            raise Exception("already failed once")

    with pytest.raises(NoKernel) as caught:
        triton_ops.start(Kernel(), (1,), torch.zeros(1))
    assert isinstance(caught.value.__cause__, OSError)


def test_two_threads_that_fail_at_the_same_time_say_it_once(here, caplog):
    for thread in range(2):  # both had begun before the first one failed
        here.give_up(RuntimeError(f"thread {thread}"))
    assert len(said(caplog)) == 1 and "thread 0" in said(caplog)[0]


def test_triton_has_what_loads_a_kernel():
    """A name of Triton's own; its release for NPUs is looked at in tests/unit/ascend/test_vendor_surface.py."""
    from triton.compiler.compiler import CompiledKernel

    assert callable(CompiledKernel._init_handles)
