"""The four operations as loops that read like their definitions: the reference of every other path.

Arguments are taken as ops documents and checks demands; these functions check nothing, so that a test sees a fault of
theirs rather than a rejection.
"""

from collections.abc import Sequence

import torch

from sglang_hetero.merge.checks import Block, bit_view


def merge_kv(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    pages: torch.Tensor,
    head_offsets: Sequence[int],
    tokens: int | None = None,
) -> None:
    """pool [layers, pages, page, heads, dim]; shards [layers, n, page, heads_i, dim]; pages int64 [n].

    pool[layer, pages[i], row, offset + head] = shard[layer, i, row, head] for every live row.
    """
    target = bit_view(pool)
    for shard, offset in zip(shards, head_offsets, strict=True):
        source = bit_view(shard)
        heads = source.shape[3]
        for layer in range(target.shape[0]):
            for i, page in enumerate(pages.tolist()):
                rows = _live_rows(i, len(pages), target.shape[2], tokens)
                target[layer, page, :rows, offset : offset + heads] = source[layer, i, :rows]


def pack_kv(
    out: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor, head_start: int, tokens: int | None = None
) -> None:
    """out [layers, n, page, heads_i, dim]; pool [layers, pages, page, heads, dim]; pages int64 [n].

    out[layer, i, row, head] = pool[layer, pages[i], row, head_start + head] for every live row.
    """
    target, source = bit_view(out), bit_view(pool)
    heads = target.shape[3]
    for layer in range(target.shape[0]):
        for i, page in enumerate(pages.tolist()):
            rows = _live_rows(i, len(pages), target.shape[2], tokens)
            target[layer, i, :rows] = source[layer, page, :rows, head_start : head_start + heads]


def reorder_conv(
    pool: torch.Tensor, shards: Sequence[torch.Tensor], slots: torch.Tensor, blocks: Sequence[Sequence[Block]]
) -> None:
    """pool [layers, slots, channels, window]; shards [layers, n, channels_i, window]; slots int64 [n].

    pool[layer, slots[i], destination + c] = shard[layer, i, source + c] for every channel c of every block.
    """
    target = bit_view(pool)
    for shard, own in zip(shards, blocks, strict=True):
        origin = bit_view(shard)
        for layer in range(target.shape[0]):
            for i, slot in enumerate(slots.tolist()):
                for source, destination, width in own:
                    for c in range(width):
                        target[layer, slot, destination + c] = origin[layer, i, source + c]


def scatter_ssm(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    slots: torch.Tensor,
    head_offsets: Sequence[int],
    checkpoint_stride: int = 1,
) -> None:
    """pool [layers, slots, heads, dv, dk]; shards [layers, n, heads_i, dv, dk]; slots int64 [n].

    pool[layer, slots[i] * checkpoint_stride, offset + head] = shard[layer, i, head].
    """
    target = bit_view(pool)
    for shard, offset in zip(shards, head_offsets, strict=True):
        source = bit_view(shard)
        heads = source.shape[2]
        for layer in range(target.shape[0]):
            for i, slot in enumerate(slots.tolist()):
                target[layer, slot * checkpoint_stride, offset : offset + heads] = source[layer, i]


def _live_rows(i: int, pages: int, page: int, tokens: int | None) -> int:
    """Rows of page i that hold tokens: all, but for the last page."""
    return page if tokens is None or i < pages - 1 else tokens - i * page
