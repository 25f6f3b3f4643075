"""What the arguments of the four operations must satisfy, whatever path then runs; each rule is written here once.

Ids are compared with the pool only where that is free of a device synchronisation: on the CPU. On a device the caller
answers for them: out of range or twice is undefined there.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NoReturn

import torch

from sglang_hetero.errors import MergeError

# The integer a value is moved as: a float copy may quieten a NaN or lose the sign of a zero, an integer copy may not.
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}

_KV_AXES = ("layers", "pages", "page", "heads", "dim")
_CONV_AXES = ("layers", "slots", "channels", "window")
_SSM_AXES = ("layers", "slots", "heads", "dv", "dk")
_ITEM_AXIS = 1  # pages or slots

# (source channel, destination channel, width)
Block = tuple[int, int, int]


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes and strides as integers of the same width (1, 2 or 4 bytes)."""
    return tensor.view(INTEGER[tensor.element_size()])


def merge_kv(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    pages: torch.Tensor,
    head_offsets: Sequence[int],
    tokens: int | None,
) -> int:
    """Raises MergeError, or returns the number of live tokens. Shapes: see ops.merge_kv."""
    op = "merge_kv"
    _tensors(op, _KV_AXES, pool, shards, cut="heads", written=("pool", pool))
    _ids(op, "pages", pages, pool, shards[0].shape[_ITEM_AXIS])
    _head_ranges(op, shards, head_offsets, pool.shape[_KV_AXES.index("heads")], _KV_AXES)
    return _live_tokens(op, tokens, len(pages), pool.shape[_KV_AXES.index("page")])


def pack_kv(out: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor, head_start: int, tokens: int | None) -> int:
    """Raises MergeError, or returns the number of live tokens. Shapes: see ops.pack_kv."""
    op = "pack_kv"
    _tensors(op, _KV_AXES, pool, [out], cut="heads", written=("out", out))
    _ids(op, "pages", pages, pool, out.shape[_ITEM_AXIS])
    _head_ranges(op, [out], [head_start], pool.shape[_KV_AXES.index("heads")], _KV_AXES)
    return _live_tokens(op, tokens, len(pages), pool.shape[_KV_AXES.index("page")])


def reorder_conv(
    pool: torch.Tensor, shards: Sequence[torch.Tensor], slots: torch.Tensor, blocks: Sequence[Sequence[Block]]
) -> None:
    """Raises MergeError. Shapes: see ops.reorder_conv."""
    op = "reorder_conv"
    _tensors(op, _CONV_AXES, pool, shards, cut="channels", written=("pool", pool))
    _ids(op, "slots", slots, pool, shards[0].shape[_ITEM_AXIS])
    if len(blocks) != len(shards):
        _reject(op, f"{len(shards)} shards but {len(blocks)} lists of blocks")
    axis = _CONV_AXES.index("channels")
    for index, (shard, own) in enumerate(zip(shards, blocks, strict=True)):
        channels = shard.shape[axis]
        for source, _, width in own:
            if not _is_within(source, width, channels):
                _reject(op, f"a block of shard {index} reads {width} channels from {source}; there are {channels}")
    targets = [(target, width, index) for index, own in enumerate(blocks) for _, target, width in own]
    _disjoint(op, targets, pool.shape[axis], "channels")


def scatter_ssm(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    slots: torch.Tensor,
    head_offsets: Sequence[int],
    checkpoint_stride: int,
) -> None:
    """Raises MergeError. Shapes: see ops.scatter_ssm."""
    op = "scatter_ssm"
    _tensors(op, _SSM_AXES, pool, shards, cut="heads", written=("pool", pool))
    if checkpoint_stride < 1:
        _reject(op, f"checkpoint_stride is {checkpoint_stride}; a request has at least one checkpoint")
    _ids(op, "slots", slots, pool, shards[0].shape[_ITEM_AXIS], stride=checkpoint_stride)
    _head_ranges(op, shards, head_offsets, pool.shape[_SSM_AXES.index("heads")], _SSM_AXES)


def _reject(op: str, reason: str) -> NoReturn:
    raise MergeError(f"{op}: {reason}")


def _tensors(
    op: str,
    axes: Sequence[str],
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    *,
    cut: str,
    written: tuple[str, torch.Tensor],
) -> None:
    """Shards agree with the pool in all but the items, which they agree about among themselves, and the `cut` axis."""
    if not shards:
        _reject(op, "no shard was given")
    dtype, device = pool.dtype, pool.device
    if dtype.itemsize not in INTEGER:
        _reject(op, f"{dtype} has {dtype.itemsize} bytes per element; 1, 2 or 4 can be moved")
    expected = list(pool.shape)
    if len(expected) != len(axes):
        _reject(op, f"the pool has shape {expected}; expected [{', '.join(axes)}]")
    cut_axis = axes.index(cut)
    for index, shard in enumerate(shards):
        shape = list(shard.shape)
        if len(shape) != len(axes):
            _reject(op, f"shard {index} has shape {shape}; expected [{', '.join(axes)}]")
        if shard.dtype != dtype:
            _reject(op, f"shard {index} is {shard.dtype}, the pool is {dtype}; bytes are moved, never converted")
        if shard.device != device:
            _reject(op, f"shard {index} is on {shard.device}, the pool is on {device}")
        if index == 0:
            expected[_ITEM_AXIS] = shape[_ITEM_AXIS]
        expected[cut_axis] = shape[cut_axis]
        if shape != expected:
            axis = next(axis for axis in range(len(axes)) if shape[axis] != expected[axis])
            _reject(op, f"shard {index} has {shape[axis]} in axis {axes[axis]}, expected {expected[axis]}")
    name, tensor = written
    if 0 in tensor.stride() and any(
        not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        _reject(op, f"{name} is written, but its elements share memory (strides {list(tensor.stride())})")


def _ids(op: str, name: str, ids: torch.Tensor, pool: torch.Tensor, items: int, *, stride: int = 1) -> None:
    """ids int64 [items], distinct, each with ids * stride in the pool."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_contiguous():
        _reject(op, f"{name} must be a contiguous int64 vector, not {ids.dtype} {list(ids.shape)}")
    if len(ids) != items:
        _reject(op, f"{len(ids)} {name} for {items} items in the shards")
    device = ids.device
    if device != pool.device:
        _reject(op, f"{name} is on {device}, the pool is on {pool.device}")
    if device.type != "cpu" or not items:
        return
    values = ids.tolist()
    limit = -(-pool.shape[_ITEM_AXIS] // stride)
    for value in (min(values), max(values)):
        if not 0 <= value < limit:
            _reject(op, f"{name} holds {value}; the pool has 0 to {limit - 1}")
    if len(set(values)) < items:
        twice = next(value for value, following in pairwise(sorted(values)) if value == following)
        _reject(op, f"{name} holds {twice} twice")


def _head_ranges(
    op: str, shards: Sequence[torch.Tensor], offsets: Sequence[int], heads: int, axes: Sequence[str]
) -> None:
    if len(offsets) != len(shards):
        _reject(op, f"{len(shards)} shards but {len(offsets)} head offsets")
    axis = axes.index("heads")
    ranges = [(offsets[index], shard.shape[axis], index) for index, shard in enumerate(shards)]
    _disjoint(op, ranges, heads, "heads")


def _disjoint(op: str, ranges: Iterable[tuple[int, int, int]], limit: int, unit: str) -> None:
    """ranges: (start, width, shard), each inside 0..limit and none meeting another."""
    end, before = 0, 0
    for start, width, shard in sorted(ranges):
        if not _is_within(start, width, limit):
            _reject(op, f"shard {shard} takes {width} {unit} from {start}; there are {limit}")
        if start < end:
            last = min(end, start + width) - 1
            _reject(op, f"shard {shard} and shard {before} both write {unit} {start} to {last}")
        end, before = start + width, shard


def _is_within(start: int, width: int, limit: int) -> bool:
    return width >= 1 and start >= 0 and start + width <= limit


def _live_tokens(op: str, tokens: int | None, pages: int, page: int) -> int:
    most = pages * page
    if tokens is None:
        return most
    if not most - page < tokens <= most:
        _reject(op, f"{tokens} tokens do not end in the last of {pages} pages of {page}")
    return tokens
