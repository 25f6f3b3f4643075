"""Stage: what the merge does on this device gives the bytes of its definition, and how fast it is.

Each operation, and what a transfer calls (batches.py), is compared on a small pool that was poisoned before, neighbours
included, with its definition on the host (merge/naive.py, in plain loops); then timed on a larger one, in turns with a
copy of as many bytes on the same device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from sglang_hetero.device import Lane
from sglang_hetero.doctor.lines import Line, fail, ok, skip, warn
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.merge import naive, ops
from sglang_hetero.merge.checks import Block
from sglang_hetero.merge.kernels import KERNELS

from . import batches
from .cases import CHANNELS, DIM, HEADS, PAGE, ROWS, SHARDS, SSM_DIM, SSM_HEADS, WINDOW, Case, bits, ids_of, poisoned
from .child import Say
from .stage import Settings

AREA = "kernels"
TURNS = {True: 5, False: 15}
"""Of operation and copy, by whether the run is quick."""
SEED = 7
LAYERS = {True: 4, False: 8}
PAGES = {True: 16, False: 64}
SLOTS = {True: 4, False: 16}
LOW_SHARE = 0.25
"""Of the speed of a copy, under which an accelerator's kernel is worth a look: it reads and writes the same bytes."""
OPERATIONS = ("merge_kv", "pack_kv", "reorder_conv channels_first", "reorder_conv window_first", "scatter_ssm")
BATCHES = {f"merge_batch {layout.value}": layout for layout in ConvLayout}
EMPTIES = "begin_empty"
NAMES = (*OPERATIONS, *BATCHES, EMPTIES)
PROMISES = (*NAMES, "triton")


def run(settings: Settings, _argument: str, say: Say) -> None:
    """See the module."""
    kind = settings.device
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
    if kind == "cpu":
        torch.set_num_threads(1)
    lane = Lane(device)
    for name in NAMES:
        say(_line(name, device, lane, settings.quick))
    if kind == "cpu":
        say(skip(AREA, "triton", "on a CPU the operations run with numpy; kernels are for an NPU or GPU"))
    elif KERNELS.usable:
        say(ok(AREA, "triton", "all that was merged above was merged by Triton kernels"))
    else:
        say(
            fail(
                AREA,
                "triton",
                "no kernel can be built here: strided copies were measured",
                "see this stage's log for the cause; install triton-ascend and CANN's compiler",
            )
        )


def _line(name: str, device: torch.device, lane: Lane, quick: bool) -> Line:
    if difference := _difference(_case(name, layers=2, pages=5, slots=2), device, lane):
        return fail(AREA, name, difference, "wrong bytes: do not serve with this device, and report it")
    gb, copy_gb = _speeds(_case(name, LAYERS[quick], PAGES[quick], SLOTS[quick]), device, lane, TURNS[quick])
    share = gb / copy_gb
    seen = f"bit-equal; {gb:.2f} GB/s, a copy on the same device {copy_gb:.2f} GB/s"
    figures = {"GB/s": round(gb, 3), "copy GB/s": round(copy_gb, 3), "share of copy": round(share, 3)}
    # Emptying is a start for each run of pages, whose time says nothing about the device's memory.
    if device.type != "cpu" and share < LOW_SHARE and name != EMPTIES:
        return warn(AREA, name, seen, "slow for this device: compare with the roofline in docs/ascend.md", **figures)
    return ok(AREA, name, seen, **figures)


def _difference(case: Case, device: torch.device, lane: Lane) -> str:
    """The first byte that is not as the definition has it; empty if all are, those around what is written included."""
    expected = [tensor.clone() for tensor in case.tensors]
    case.run(naive, expected)
    with lane.active():
        found = [tensor.clone().to(device) for tensor in case.tensors]
        case.run(ops, found)
    mine, other = (each[case.target].cpu().view(torch.uint8).flatten() for each in (found, expected))
    wrong = (mine != other).nonzero()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return f"{len(wrong)} of {len(mine)} bytes differ; byte {first} is {int(mine[first])}, must be {int(other[first])}"


def _speeds(case: Case, device: torch.device, lane: Lane, turns: int) -> tuple[float, float]:
    """GB/s (1e9 bytes written a second) of the operation and of a copy, medians over turns of both."""
    with lane.active():  # nothing of another stream may still be under way when a turn begins
        tensors = [tensor.to(device) for tensor in case.tensors]
        source = torch.ones(case.nbytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)

    def seconds(what: Callable[[], object]) -> float:
        start = time.perf_counter()
        with lane.active():
            what()
        return time.perf_counter() - start

    def operation() -> None:
        case.run(ops, tensors)

    def copy() -> None:
        target.copy_(source)

    operation()  # builds kernels, touches memory
    copy()
    found = [(seconds(operation), seconds(copy)) for _ in range(turns)]
    mine, other = (case.nbytes / statistics.median(column) / 1e9 for column in zip(*found, strict=True))
    return mine, other


def _case(name: str, layers: int, pages: int, slots: int) -> Case:
    generator = torch.Generator().manual_seed(SEED)
    if name in BATCHES:
        return batches.merge_batch(BATCHES[name], layers, pages, generator)
    if name == EMPTIES:
        return batches.begin_empty(layers, pages, generator)
    made = {
        "merge_kv": _merge_kv,
        "pack_kv": _pack_kv,
        "reorder_conv channels_first": _conv_channels_first,
        "reorder_conv window_first": _conv_window_first,
        "scatter_ssm": _scatter_ssm,
    }[name]
    return made(layers, slots if "conv" in name or "ssm" in name else pages, generator)


def _merge_kv(layers: int, pages: int, generator: torch.Generator) -> Case:
    share = HEADS // SHARDS
    pool = poisoned(layers, 2 * pages + 1, PAGE, HEADS, DIM, dtype=torch.bfloat16)
    shards = [bits(generator, layers, pages, PAGE, share, DIM, dtype=pool.dtype) for _ in range(SHARDS)]
    offsets = [share * rank for rank in range(SHARDS)]
    tokens = pages * PAGE - PAGE // 2

    def call(module: object, tensors: Sequence[torch.Tensor]) -> None:
        module.merge_kv(tensors[0], tensors[1:-1], tensors[-1], offsets, tokens)  # type: ignore[attr-defined]

    return Case((pool, *shards, ids_of(pages, generator)), 0, call, sum(shard.nbytes for shard in shards))


def _pack_kv(layers: int, pages: int, generator: torch.Generator) -> Case:
    share = HEADS // SHARDS
    pool = bits(generator, layers, 2 * pages + 1, PAGE, HEADS, DIM, dtype=torch.bfloat16)
    out = poisoned(layers, pages, PAGE, share, DIM, dtype=pool.dtype)

    def call(module: object, tensors: Sequence[torch.Tensor]) -> None:
        module.pack_kv(tensors[0], tensors[1], tensors[2], share)  # type: ignore[attr-defined]

    return Case((out, pool, ids_of(pages, generator)), 0, call, out.nbytes)


def _blocks() -> list[list[Block]]:
    """q, k and v of each shard, and where they belong."""
    share = CHANNELS // SHARDS
    return [[(part * share, part * CHANNELS + rank * share, share) for part in range(3)] for rank in range(SHARDS)]


def _conv_channels_first(layers: int, slots: int, generator: torch.Generator) -> Case:
    pool = poisoned(layers, 2 * slots + 1, 3 * CHANNELS, WINDOW, dtype=torch.bfloat16)
    shards = [bits(generator, layers, slots, 3 * CHANNELS // SHARDS, WINDOW, dtype=pool.dtype) for _ in range(SHARDS)]

    def call(module: object, tensors: Sequence[torch.Tensor]) -> None:
        module.reorder_conv(tensors[0], tensors[1:-1], tensors[-1], _blocks())  # type: ignore[attr-defined]

    return Case((pool, *shards, ids_of(slots, generator)), 0, call, sum(shard.nbytes for shard in shards))


def _conv_window_first(layers: int, slots: int, generator: torch.Generator) -> Case:
    """The live rows are the last ones of a slot; the others must keep their bytes."""
    pool = poisoned(layers, 2 * slots + 1, ROWS, 3 * CHANNELS, dtype=torch.bfloat16)
    shards = [bits(generator, layers, slots, WINDOW, 3 * CHANNELS // SHARDS, dtype=pool.dtype) for _ in range(SHARDS)]

    def call(module: object, tensors: Sequence[torch.Tensor]) -> None:
        live = tensors[0][:, :, ROWS - WINDOW :].transpose(2, 3)
        sent = [shard.transpose(2, 3) for shard in tensors[1:-1]]
        module.reorder_conv(live, sent, tensors[-1], _blocks())  # type: ignore[attr-defined]

    return Case((pool, *shards, ids_of(slots, generator)), 0, call, sum(shard.nbytes for shard in shards))


def _scatter_ssm(layers: int, slots: int, generator: torch.Generator) -> Case:
    share = SSM_HEADS // SHARDS
    pool = poisoned(layers, 2 * slots + 1, SSM_HEADS, SSM_DIM, SSM_DIM, dtype=torch.float32)
    shards = [bits(generator, layers, slots, share, SSM_DIM, SSM_DIM, dtype=pool.dtype) for _ in range(SHARDS)]
    offsets = [share * rank for rank in range(SHARDS)]

    def call(module: object, tensors: Sequence[torch.Tensor]) -> None:
        module.scatter_ssm(tensors[0], tensors[1:-1], tensors[-1], offsets)  # type: ignore[attr-defined]

    return Case((pool, *shards, ids_of(slots, generator)), 0, call, sum(shard.nbytes for shard in shards))
