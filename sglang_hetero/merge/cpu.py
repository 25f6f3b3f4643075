"""The four operations with numpy on the CPU, in one thread about as fast as its memory.

Measured with pages of 64 KiB per shard and layer, against a memcpy of the same bytes: one torch copy_ per run of
neighbouring pages over all layers, the shards of a run in turn, reached 0.78 (shard by shard 0.73; numpy 0.73, which
won for single layers, 0.73 to torch's 0.55, and for the long rows of conv and SSM; index_copy_ 0.37); of scattered
items of 7 KiB, 0.16 became 0.6 with numpy's indexed assignment of whole rows and 0.7 with index_select.

Arguments are taken as ops documents and checks demands. Nothing is allocated but views.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_hetero.merge.checks import Block, bit_view

_Array = np.ndarray[Any, np.dtype[Any]]

# Average bytes of a copy, below which its start costs more than numpy's indexed assignment of all items.
_SMALL = 16 * 1024
# Bytes of a copy of heads, from which on torch is the faster one; below, numpy needs less to make a view and to start.
_LARGE = 256 * 1024
_FIRST_ITEM_AXIS = 2  # the axes before it are layers and items


class Pair(NamedTuple):
    """The same elements on both sides: pool [layers, items, ...] and shard [layers, n, ...], as integers."""

    pool: _Array
    shard: _Array


def merge_kv(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    pages: torch.Tensor,
    head_offsets: Sequence[int],
    tokens: int | None = None,
) -> None:
    """See ops.merge_kv."""
    target = _array(pool)
    pairs = []
    for shard, offset in zip(map(_array, shards), head_offsets, strict=True):
        pairs.append(Pair(target[:, :, :, offset : offset + shard.shape[3]], shard))
    for part, ids in _live_parts(pairs, pages.numpy(), tokens):
        _scatter(part, ids, _copy_heads)


def pack_kv(
    out: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor, head_start: int, tokens: int | None = None
) -> None:
    """See ops.pack_kv."""
    pair = Pair(_array(pool)[:, :, :, head_start : head_start + out.shape[3]], _array(out))
    for (part,), ids in _live_parts([pair], pages.numpy(), tokens):
        _gather(part, ids)


def reorder_conv(
    pool: torch.Tensor, shards: Sequence[torch.Tensor], slots: torch.Tensor, blocks: Sequence[Sequence[Block]]
) -> None:
    """See ops.reorder_conv."""
    target = _array(pool)
    pairs = []
    for shard, own in zip(map(_array, shards), blocks, strict=True):
        for source, destination, width in own:
            pairs.append(Pair(target[:, :, destination : destination + width], shard[:, :, source : source + width]))
    _scatter(pairs, slots.numpy(), np.copyto)


def scatter_ssm(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    slots: torch.Tensor,
    head_offsets: Sequence[int],
    checkpoint_stride: int = 1,
) -> None:
    """See ops.scatter_ssm."""
    target = _array(pool)[:, ::checkpoint_stride]
    pairs = []
    for shard, offset in zip(map(_array, shards), head_offsets, strict=True):
        pairs.append(Pair(target[:, :, offset : offset + shard.shape[2]], shard))
    _scatter(pairs, slots.numpy(), np.copyto)


def copy_items(pairs: Sequence[Pair], ids: _Array, rows: int | None = None) -> None:
    """pool[ids[i]] = shard[i] for every pair, here [items, ...] and [n, ...]; ids int64 [n], distinct.

    rows: with pages, how many tokens of all of them; those behind are left as they are. Few lines of Python run for a
    piece, as between two pieces the caches forget them: what takes 15 us in a loop takes 30 there, of 300 in all.
    """
    full, tail = (len(ids), 0) if rows is None else divmod(rows, pairs[0].pool.shape[1])
    if tail:
        item = int(ids[full])
        for pool, shard in pairs:
            np.copyto(pool[item, :tail], shard[full, :tail])
        if not full:
            return
        pairs, ids = [Pair(pool, shard[:full]) for pool, shard in pairs], ids[:full]
    starts = _run_starts(ids)
    if len(starts) > 1 and max(shard.nbytes for _, shard in pairs) < len(starts) * _SMALL:
        for pair in pairs:
            pool, shard = _rows(Pair(pair.pool[None], pair.shard[None]))
            pool[0][ids] = shard[0]
    elif len(starts) == len(ids) or (len(pairs) > 1 and pairs[0].shard.nbytes >= len(ids) * _SMALL):
        # Item by item, all pairs in turn: what one has written of an item is then still in the cache for the next.
        for number, item in enumerate(ids.tolist()):
            for pool, shard in pairs:
                np.copyto(pool[item], shard[number])
    else:
        for start, item, count in _runs(ids, starts):
            for pool, shard in pairs:
                np.copyto(pool[item : item + count], shard[start : start + count])


def _array(tensor: torch.Tensor) -> _Array:
    array: _Array = bit_view(tensor).numpy()
    return array


def _live_parts(pairs: Sequence[Pair], pages: _Array, tokens: int | None) -> Iterator[tuple[list[Pair], _Array]]:
    """The full pages with their ids, then the live rows of a last page that is not full. pages int64 [n]."""
    page = pairs[0].pool.shape[2]
    full, rows = (len(pages), 0) if tokens is None else divmod(tokens, page)
    if full:
        yield [Pair(pool, shard[:, :full]) for pool, shard in pairs], pages[:full]
    if rows:
        yield [Pair(pool[:, :, :rows], shard[:, full:, :rows]) for pool, shard in pairs], pages[full:]


def _scatter(pairs: Sequence[Pair], ids: _Array, copy: Callable[[_Array, _Array], None]) -> None:
    """pool[:, ids[i]] = shard[:, i] for every pair; ids int64 [n]; copy(target, source): how runs are copied."""
    starts = _run_starts(ids)
    if _too_small(len(starts), pairs):
        for pool, shard in map(_rows, pairs):
            for layer in range(len(pool)):
                pool[layer][ids] = shard[layer]
        return
    for start, item, count in _runs(ids, starts):
        # All shards of a run in turn: they write into the same memory pages, which are then still in the TLB.
        for pool, shard in pairs:
            copy(pool[:, item : item + count], shard[:, start : start + count])


def _gather(pair: Pair, ids: _Array) -> None:
    """shard[:, i] = pool[:, ids[i]]; ids int64 [n]."""
    starts = _run_starts(ids)
    if _too_small(len(starts), [pair]):
        index = torch.from_numpy(ids)
        for pool, shard in zip(*pair, strict=True):
            # Not numpy's indexing, which would allocate what it collects.
            torch.index_select(torch.from_numpy(pool), 0, index, out=torch.from_numpy(shard))
        return
    for start, item, count in _runs(ids, starts):
        _copy_heads(pair.shard[:, start : start + count], pair.pool[:, item : item + count])


def _copy_heads(target: _Array, source: _Array) -> None:
    if source.nbytes < _LARGE:
        np.copyto(target, source)
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


def _run_starts(ids: _Array) -> list[int]:
    """Positions at which ids does not go on by one, 0 included; ids int64 [n], n > 0."""
    if len(ids) == 1:
        return [0]
    return [0, *(np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1).tolist()]


def _runs(ids: _Array, starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, item, count) of every run: shard items from `start` belong to `count` pool items from `item`."""
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield start, int(ids[start]), end - start


def _too_small(runs: int, pairs: Sequence[Pair]) -> bool:
    """Whether copies run by run would mostly consist of their start."""
    return runs > 1 and max(shard.nbytes for _, shard in pairs) < runs * _SMALL


def _rows(pair: Pair) -> Pair:
    """The pair with the longest stretches of bytes that both sides have in one piece as elements.

    numpy's indexed assignment moves an element at a time.
    """
    axis = max(map(_row_axis, pair))
    width = int(np.prod(pair.pool.shape[axis:]))
    if width == 1:
        return pair
    row = np.dtype((np.void, width * pair.pool.itemsize))
    pool, shard = (side.reshape(*side.shape[:axis], width).view(row) for side in pair)  # in one piece, so no copy
    return Pair(pool, shard)


def _row_axis(array: _Array) -> int:
    """The first axis, behind the items, from which on elements lie in one piece; array.ndim if the last is strided."""
    axis, size = array.ndim, array.itemsize
    while axis > _FIRST_ITEM_AXIS and (array.shape[axis - 1] == 1 or array.strides[axis - 1] == size):
        axis -= 1
        size *= array.shape[axis]
    return axis
