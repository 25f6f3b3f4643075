"""Launchers of the Triton kernel: the merge operations on an NPU or a GPU, and in Triton's interpreter.

Each cuts its operation into rectangles `[layers, items, rows, columns]` with dense columns and starts one kernel for
each of them, over all layers. Only views are made and, but for reorder_conv between two orders in memory, nothing is
allocated. Nothing waits for the device: kernels go to the current stream of the current device, which has to be that of
the tensors.

Elements are moved as integers of 1, 2 or 4 bytes, so that no bit changes. The arguments are those that ops documents
and checks demands; only what this file itself adds is checked here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton

from sglang_hetero.errors import MergeError
from sglang_hetero.merge import triton_kernels
from sglang_hetero.merge.checks import Block, bit_view
from sglang_hetero.merge.chip import WARPS, chip
from sglang_hetero.merge.kernels import NoKernel

# The shortest row of a tile: rows in an NPU's on-chip memory begin at multiples of 32 bytes.
MIN_ROW_BYTES = 32
MAX_TASKS = 2**30  # the kernel counts tiles in int32, in steps of its programs


def merge_kv(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    pages: torch.Tensor,
    head_offsets: Sequence[int],
    tokens: int | None = None,
    *,
    programs: int | None = None,
) -> None:
    """Copy shards of pages into the pages: see ops.merge_kv. One launch for each shard.

    The last two axes of pool and shards are dense, the others have any stride (MergeError otherwise).
    programs: how many to start, by default what fills the device.
    """
    parts = [
        (_matrix_rows(pool.narrow(3, offset, shard.shape[3])), _matrix_rows(shard))
        for shard, offset in zip(shards, head_offsets, strict=True)
    ]
    _start_all(parts, pages, tokens=tokens, programs=programs)


def pack_kv(
    out: torch.Tensor,
    pool: torch.Tensor,
    pages: torch.Tensor,
    head_start: int,
    tokens: int | None = None,
    *,
    programs: int | None = None,
) -> None:
    """Gather some heads of pages: see ops.pack_kv. One launch.

    The last two axes of out and pool are dense; programs as in merge_kv.
    """
    part = pool.narrow(3, head_start, out.shape[3])
    _start_all([(_matrix_rows(out), _matrix_rows(part))], pages, scatter=False, tokens=tokens, programs=programs)


def reorder_conv(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    slots: torch.Tensor,
    blocks: Sequence[Sequence[Block]],
    *,
    programs: int | None = None,
) -> None:
    """Copy blocks of channels to where they belong: see ops.reorder_conv. One launch for each block.

    In memory either the channels or the window may be the dense axis, whatever the shape says. Where that of a shard is
    not that of the pool, there are no rows to move: torch's indexed assignment takes over, element by element.
    """
    rectangles = []
    for shard, own in zip(shards, blocks, strict=True):
        for source, destination, width in own:
            part = pool.narrow(2, destination, width)
            block = shard.narrow(2, source, width)
            found = _conv_rectangles(part, block)
            if found is None:
                bit_view(part)[:, slots] = bit_view(block)
            else:
                rectangles.append(found)
    _start_all(rectangles, slots, programs=programs)


def scatter_ssm(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    slots: torch.Tensor,
    head_offsets: Sequence[int],
    checkpoint_stride: int = 1,
    *,
    programs: int | None = None,
) -> None:
    """Copy shards of heads into slots: see ops.scatter_ssm. One launch for each shard.

    The last two axes of pool and shards are dense; programs as in merge_kv.
    """
    checkpoints = pool[:, ::checkpoint_stride]
    parts = [
        (_matrix_rows(checkpoints.narrow(2, offset, shard.shape[2])), _matrix_rows(shard))
        for shard, offset in zip(shards, head_offsets, strict=True)
    ]
    _start_all(parts, slots, programs=programs)


def tile_shape(cols: int, itemsize: int, tile_bytes: int) -> tuple[int, int]:
    """`(rows, columns)` in elements of the tile for rows of `cols`: the narrowest that holds one, else a single row.

    tile_bytes: of the chip, a power of two.
    """
    row_bytes = min(max(triton.next_power_of_2(cols * itemsize), MIN_ROW_BYTES), tile_bytes)
    return tile_bytes // row_bytes, row_bytes // itemsize


def tile_shapes(itemsize: int, tile_bytes: int) -> list[tuple[int, int]]:
    """All that tile_shape can give for an item size, for a compiler to try."""
    widths = range(MIN_ROW_BYTES.bit_length() - 1, tile_bytes.bit_length())
    return [tile_shape(2**width // itemsize, itemsize, tile_bytes) for width in widths]


def start(kernel: Any, grid: tuple[int], dst: torch.Tensor, *arguments: torch.Tensor, **figures: Any) -> None:
    """Start a kernel; the first time Triton builds it. Raises NoKernel if it cannot be built or loaded here.

    What else goes wrong with a start (memory that the device does not have, a fault of an earlier kernel) says nothing
    about the next one, and is raised as it is.
    """
    # An NPU has no warps, and says so in its log.
    options = {"num_warps": WARPS} if dst.device.type == "cuda" else {}
    try:
        kernel[grid](dst, *arguments, **figures, **options)
    except Exception as error:
        if _can_be_built(kernel, grid, dst, *arguments, **figures, **options):
            raise
        raise NoKernel from error


def _can_be_built(kernel: Any, grid: tuple[int], *arguments: torch.Tensor, **figures: Any) -> bool:
    """Whether a kernel can be built and loaded here; it is not started.

    Asked behind an error only, whose type does not tell: Triton, the compilers that it calls and what loads their
    results raise RuntimeError, OSError and classes of their own, and a start that fails raises RuntimeError, too. What
    has been built is in Triton's cache, so that only a build that fails is tried twice.
    """
    try:
        built = kernel.warmup(*arguments, grid=grid, **figures)
        if built is not None:  # Triton's interpreter builds nothing
            built._init_handles()
    except Exception:
        return False
    return True


def _matrix_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[layers, items, rows, a, b]` as `[layers, items, rows, a * b]`: rows are tokens of a page or heads of a state.

    Raises MergeError where those columns are not dense.
    """
    dense = tensor.stride(4) == 1 or tensor.shape[4] == 1
    if not dense or (tensor.shape[3] > 1 and tensor.stride(3) != tensor.shape[4]):
        raise MergeError(
            f"the kernel copies rows of dense elements, but the last two axes of {list(tensor.shape)} have strides "
            f"{list(tensor.stride()[3:])}; only the path for the CPU moves such caches"
        )
    return tensor.as_strided(
        (*tensor.shape[:3], tensor.shape[3] * tensor.shape[4]), (*tensor.stride()[:3], 1), tensor.storage_offset()
    )


def _conv_rectangles(part: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both `[layers, items, channels, window]` as `[layers, items, rows, columns]` with dense columns, or None."""
    window = part.shape[3]
    if all(_is_dense(view, 3) and view.stride(2) == window for view in (part, block)):  # no gap between the channels
        return part.flatten(2).unsqueeze(2), block.flatten(2).unsqueeze(2)
    if all(_is_dense(view, 2) for view in (part, block)):
        return part.transpose(2, 3), block.transpose(2, 3)
    if all(_is_dense(view, 3) for view in (part, block)):
        return part, block
    return None


def _is_dense(view: torch.Tensor, axis: int) -> bool:
    return view.stride(axis) == 1 or view.shape[axis] == 1


def _start_all(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ids: torch.Tensor,
    *,
    scatter: bool = True,
    tokens: int | None = None,
    programs: int | None = None,
) -> None:
    """Start the kernel for `dst[:, ids[i]] = src[:, i]` (scatter) or `dst[:, i] = src[:, ids[i]]` of every (dst, src).

    dst, src: `[layers, items or places, rows, columns]` with dense columns; the side that ids do not index has exactly
        one item for each. tokens: rows over all items, those of the last item that are behind them are left out.
    Raises MergeError, before the first launch, where there are more tiles than the kernel can count.
    """
    filled = [(dst, src) for dst, src in pairs if src.numel() and dst.numel()]
    launches = [_launch(dst, src, scatter=scatter, tokens=tokens) for dst, src in filled]
    for (dst, src), arguments in zip(filled, launches, strict=True):
        grid = (min(programs or chip(dst.device).programs, arguments["tasks"]),)
        start(triton_kernels.copy_blocks, grid, bit_view(dst), bit_view(src), ids, **arguments)


def _launch(dst: torch.Tensor, src: torch.Tensor, *, scatter: bool, tokens: int | None) -> dict[str, int]:
    """The kernel's arguments for one pair but for its pointers. Raises MergeError for more tiles than it can count."""
    layers, items, rows, cols = (src if scatter else dst).shape
    last_rows = rows if tokens is None else tokens - (items - 1) * rows
    block_rows, block_cols = tile_shape(cols, dst.element_size(), chip(dst.device).tile_bytes)
    row_blocks = triton.cdiv(rows, block_rows)
    layer_blocks = (items - 1) * row_blocks + triton.cdiv(last_rows, block_rows)
    col_blocks = triton.cdiv(cols, block_cols)
    tasks = layers * layer_blocks * col_blocks
    if tasks > MAX_TASKS:
        raise MergeError(f"{tasks} tiles in one launch, at most {MAX_TASKS} can be counted: copy fewer items at once")
    return {
        "tasks": tasks,
        "layer_blocks": layer_blocks,
        "row_blocks": row_blocks,
        "col_blocks": col_blocks,
        "rows": rows,
        "last_rows": last_rows,
        "last_item": items - 1,
        "cols": cols,
        **_strides("dst", dst),
        **_strides("src", src),
        "SCATTER": scatter,
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
    }


def _strides(side: str, view: torch.Tensor) -> dict[str, int]:
    """The kernel's stride arguments, in elements: 0 for an axis of one element.

    Such an axis may have any stride, and Triton would compile the kernel anew for a 1.
    """
    axes = zip(("layer", "item", "row"), view.shape[:3], view.stride()[:3], strict=True)
    return {f"{side}_{axis}": stride if size > 1 else 0 for axis, size, stride in axes}
