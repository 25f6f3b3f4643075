"""A batch on an NPU or a GPU: a table of tiles, made by the host, and one kernel launch for each shape of tile.

Nothing waits for the device, and nothing is read from it: ids come from the host. The table (64 bytes for 32 KiB that
are moved) is copied once per batch.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_hetero.device import to_device
from sglang_hetero.errors import MergeError

from . import triton_kernels
from .batch import Move, copy_elements
from .checks import INTEGER
from .chip import chip
from .copies import Rectangle
from .triton_ops import start, tile_shape

Table = npt.NDArray[np.int64]

# Columns of a table of rectangles, in bytes but for ROWS; the kernel's table has the same ones in elements.
DST, SRC, ROWS, COLS, DST_ROW, SRC_ROW = range(6)
BYTE_COLUMNS = [DST, SRC, COLS, DST_ROW, SRC_ROW]
FIELDS = triton_kernels.FIELDS.value
# The widest load of a GPU; also the alignment that Triton looks for in arguments.
ALIGN_BYTES = 16
# The widest element that the kernel moves; tensors of wider integers are none of triton-ascend's bulk copies.
ELEMENT_BYTES = max(INTEGER)


# The kernel counts the figures of its table in int32, in steps of its programs.
MAX_TILES = 2**30 // FIELDS


class Launch(NamedTuple):
    """One start of the kernel. element, align: bytes. tiles: [n, FIELDS] in elements."""

    element: int
    align: int
    block: tuple[int, int]
    tiles: Table


class Launcher:
    """Starts the copies of a batch on the current stream of the current device, which must be the tensors'.

    It keeps nothing of a batch, so that any threads may call it, each on a stream of its own.
    """

    def __init__(self, programs: int | None = None) -> None:
        """programs: how many to start, by default what fills the device."""
        self._programs = programs

    def __call__(self, arena: torch.Tensor, moves: Sequence[Move]) -> None:
        """Raises MergeError, before the first start, where there are more tiles than the kernel can count; NoKernel."""
        base = min((move.recipe.layer.memory for move in moves), key=torch.Tensor.data_ptr)
        launches = plan_launches(arena, base, moves, chip(arena.device).tile_bytes)
        if launches:
            table = to_device(np.concatenate([launch.tiles for launch in launches]), arena.device)
            start = 0
            for launch in launches:
                end = start + len(launch.tiles)
                dst, src = (_integers(memory, launch.element) for memory in (base, arena))
                self._start(launch, dst, src, table[start:end])
                start = end
        for move in moves:  # conv windows between two orders; a request has one slot
            copy_elements(arena, move, move.recipe.elementwise)

    def _start(self, launch: Launch, dst: torch.Tensor, src: torch.Tensor, table: torch.Tensor) -> None:
        grid = (min(self._programs or chip(dst.device).programs, len(launch.tiles)),)
        rows, cols = launch.block
        start(
            triton_kernels.copy_tiles,
            grid,
            dst,
            src,
            table,
            tiles=len(launch.tiles),
            ALIGN=launch.align // launch.element,
            BLOCK_ROWS=rows,
            BLOCK_COLS=cols,
        )


def plan_launches(arena: torch.Tensor, base: torch.Tensor, moves: Sequence[Move], tile_bytes: int) -> list[Launch]:
    """The starts for the rectangles of a batch; places count from `base`, the lowest of the layers, and the arena."""
    groups: dict[int, list[Table]] = defaultdict(list)
    for move in moves:
        offset = move.recipe.layer.memory.data_ptr() - base.data_ptr()
        for shape in move.recipe.rectangles:
            groups[_row_class(shape.cols, tile_bytes)].append(_rectangles(shape, move, offset))
    return [_launch(np.concatenate(parts), arena, base, tile_bytes) for _, parts in sorted(groups.items())]


def _rectangles(shape: Rectangle, move: Move, offset: int) -> Table:
    """[n, 6] in bytes: a rectangle for each run of items and each place in an item. offset: of the layer's memory."""
    ids, count = move.ids, len(move.ids)
    first = np.arange(count)
    if shape.joins:
        first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1] + 1))
    rows = np.diff(np.append(first, count)) * shape.rows
    if move.rows is not None:
        rows[-1] -= count * shape.rows - move.rows
    places = np.array(shape.places, dtype=np.int64)
    table = np.empty((len(first), len(places), 6), dtype=np.int64)
    table[..., DST] = (offset + ids[first] * shape.target_item)[:, None] + places[:, 0]
    table[..., SRC] = (move.start + first * shape.source_item)[:, None] + places[:, 1]
    table[..., ROWS] = rows[:, None]
    table[..., COLS] = shape.cols
    # A rectangle of one row has any stride, which is to say nothing about alignment.
    table[..., DST_ROW] = np.where(rows > 1, shape.target_row, 0)[:, None]
    table[..., SRC_ROW] = np.where(rows > 1, shape.source_row, 0)[:, None]
    return table.reshape(-1, 6)


def _launch(rectangles: Table, arena: torch.Tensor, base: torch.Tensor, tile_bytes: int) -> Launch:
    """All rectangles of one class of row lengths, cut into tiles."""
    figures = int(np.bitwise_or.reduce(rectangles[:, BYTE_COLUMNS], axis=None))
    for memory in (arena, base):
        figures |= memory.data_ptr() | memory.storage_offset()
    align = min(figures & -figures or ALIGN_BYTES, ALIGN_BYTES)
    element = min(align, ELEMENT_BYTES)
    widest = _row_class(int(rectangles[0, COLS]), tile_bytes)
    block = block_rows, block_cols = tile_shape(widest // element, element, tile_bytes)
    down, across = -(-rectangles[:, ROWS] // block_rows), -(-rectangles[:, COLS] // (block_cols * element))
    counts = down * across
    if int(counts.sum()) > MAX_TILES:
        raise MergeError(f"{counts.sum()} tiles in one batch, at most {MAX_TILES} can be counted: merge fewer pieces")
    which = np.repeat(np.arange(len(rectangles)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    row, col = number // across[which] * block_rows, number % across[which] * block_cols * element
    whole = rectangles[which]
    tiles = np.zeros((len(which), FIELDS), dtype=np.int64)
    tiles[:, DST] = whole[:, DST] + row * whole[:, DST_ROW] + col
    tiles[:, SRC] = whole[:, SRC] + row * whole[:, SRC_ROW] + col
    tiles[:, ROWS] = np.minimum(whole[:, ROWS] - row, block_rows)
    tiles[:, COLS] = np.minimum(whole[:, COLS] - col, block_cols * element)
    tiles[:, [DST_ROW, SRC_ROW]] = whole[:, [DST_ROW, SRC_ROW]]
    tiles[:, BYTE_COLUMNS] //= element
    return Launch(element, align, block, tiles)


def _row_class(cols: int, tile_bytes: int) -> int:
    """Bytes of the row of a tile for rows of so many: rows of one class share a launch."""
    return tile_shape(cols, 1, tile_bytes)[1]


def _integers(memory: torch.Tensor, element: int) -> torch.Tensor:
    """A row of uint8 as a row of integers, for its address and its type."""
    return memory[: memory.numel() // element * element].view(INTEGER[element])
