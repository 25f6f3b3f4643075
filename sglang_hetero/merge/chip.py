"""What a kernel may use of a chip: how many programs run at the same time, and how large a tile is.

Nothing here is measured: there was no NPU. Figures that a vendor's library tells are asked for; the others are in a
table with where they come from.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hetero.device import properties

KIB = 1024


@dataclass(frozen=True)
class Chip:
    """programs: that run at the same time. tile_bytes: that one moves at a time, a power of two."""

    programs: int
    tile_bytes: int


@dataclass(frozen=True)
class VectorCore:
    """Of an Ascend chip. on_chip: bytes of memory (unified buffer) of one. cores: of the smallest chip of that kind."""

    on_chip: int
    cores: int


ASCEND = {
    "Ascend910B": VectorCore(192 * KIB, 40),
    "Ascend910_93": VectorCore(192 * KIB, 40),
    "Ascend910_95": VectorCore(256 * KIB, 40),
    "Ascend950": VectorCore(256 * KIB, 40),
}
"""By the beginning of the chip's name: A2, one die of A3, and the generation behind them under both of its names.

on_chip: catlass, AtlasA2 UB_SIZE; for both sizes torch_npu 2.13, _inductor/config.py, `ub_size`. Neither torch_npu nor
triton-ascend tells it of a device. cores: catlass, MaxAivBlock of a 910B3, which has 20 AI cores of two vector cores
each; for the other chips a guess, for want of a figure. It counts only where no library tells the number."""
UNKNOWN = VectorCore(192 * KIB, 40)
"""A chip of another name: the least of the above, which the larger ones can do with."""

BUFFERS_PER_TILE = 2
"""The compiler doubles a tile's buffer, so that one is read while the other is written."""
SPARE = 2
"""A tile and its double take no more than one part in so many of a core's memory: the rest is the compiler's."""

WARPS = 16
THREADS_PER_WARP = 32
BYTES_PER_THREAD = 64
"""On a GPU a thread takes four loads of 16 bytes, the widest there are."""
WARPS_PER_MULTIPROCESSOR = 64
INTERPRETER = Chip(programs=2, tile_bytes=WARPS * THREADS_PER_WARP * BYTES_PER_THREAD)
"""On a CPU only Triton's interpreter runs kernels, one program after the other: two show that they share the work."""


def chip(device: torch.device) -> Chip:
    """The chip of a device; asked once for each."""
    return _chip(device.type, device.index)


def npu(name: str, vector_cores: int) -> Chip:
    """An Ascend chip by what torch_npu says of it; vector_cores: 0 where it does not say that."""
    known = next((core for prefix, core in ASCEND.items() if name.startswith(prefix)), UNKNOWN)
    return Chip(vector_cores or known.cores, _power_of_two_below(known.on_chip // SPARE // BUFFERS_PER_TILE))


def gpu(multiprocessors: int) -> Chip:
    """A GPU: as many programs as fill its multiprocessors' warps."""
    return Chip(
        multiprocessors * (WARPS_PER_MULTIPROCESSOR // WARPS), tile_bytes=WARPS * THREADS_PER_WARP * BYTES_PER_THREAD
    )


@functools.cache
def _chip(kind: str, index: int | None) -> Chip:
    if kind == "cpu":
        return INTERPRETER
    found = properties(torch.device(kind, index))
    if kind == "cuda":
        return gpu(int(found.multi_processor_count))
    cores = getattr(found, "vector_core_num", 0)  # older releases of torch_npu do not say it
    return npu(str(getattr(found, "name", "")), int(cores) or _asked(_triton_vector_cores))


def _asked(question: Callable[[], Any]) -> int:
    """What a library answers, 0 if it cannot: any number of programs does the work, at another speed."""
    try:
        return int(question())
    except Exception:
        return 0


def _triton_vector_cores() -> Any:
    import triton

    active = triton.runtime.driver.active
    return active.utils.get_device_properties(active.get_current_device())["num_vectorcore"]


def _power_of_two_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)
