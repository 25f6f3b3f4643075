"""The four operations that move bytes between staging and the live pools, on whatever device the tensors are.

The transfer packs with pack_kv; what arrives it merges in batches (batch.py). The other three merge a piece at a time
for `Assembler.merge_pages` and `merge_slot`; docs/core.md says what those are kept for.

All take any dtype of 1, 2 or 4 bytes and preserve every bit; source and destination have one dtype and one device. The
leading `layers` axis makes one call (on a device: one launch) out of many layers; stack_layers makes it out of
per-layer pools. Pools and shards may be strided views. No tensor is allocated. Raises MergeError before anything is
written; ids are checked on the CPU only (see checks).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sglang_hetero.merge import checks, cpu, naive
from sglang_hetero.merge.checks import Block
from sglang_hetero.merge.kernels import KERNELS


def merge_kv(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    pages: torch.Tensor,
    head_offsets: Sequence[int],
    tokens: int | None = None,
) -> None:
    """Write the heads that several ranks sent side by side into the pages of a request.

    pool [layers, pages, page, heads, dim]; shards: each [layers, n, page, heads_i, dim]; pages: distinct destination
    page ids, int64 [n]; head_offsets: the first destination head of each shard. `tokens` are live over the n pages in
    order, (n-1) * page < tokens <= n * page, by default all; rows behind them are not touched.

        pool[:, pages[i], :, offset : offset + heads_i] = shard[:, i]
    """
    live = checks.merge_kv(pool, shards, pages, head_offsets, tokens)
    if shards[0].numel():
        _move("merge_kv", pool, shards, pages, head_offsets, live)


def pack_kv(
    out: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor, head_start: int, tokens: int | None = None
) -> None:
    """Collect the heads that one destination rank takes: the inverse of merge_kv, for fewer prefill than decode ranks.

    out [layers, n, page, heads_i, dim]; pool [layers, pages, page, heads, dim]; pages int64 [n]; head_start: the first
    head in the pool; tokens: as in merge_kv, rows of `out` behind them are not touched.

        out[:, i] = pool[:, pages[i], :, head_start : head_start + heads_i]
    """
    live = checks.pack_kv(out, pool, pages, head_start, tokens)
    if out.numel():
        _move("pack_kv", out, pool, pages, head_start, live)


def reorder_conv(
    pool: torch.Tensor, shards: Sequence[torch.Tensor], slots: torch.Tensor, blocks: Sequence[Sequence[Block]]
) -> None:
    """Write conv windows, whose segments are each cut over the ranks: [Q0,K0,V0] + [Q1,K1,V1] -> [Q0,Q1,K0,K1,V0,V1].

    pool [layers, slots, channels, window] and shards, each [layers, n, channels_i, window], are logical views of the
    K-1 live rows: a pool that keeps [window, channels] in memory is passed transposed, and the physical orders of pool
    and shards may differ. slots: distinct, int64 [n]. blocks: per shard the (source channel, destination channel,
    width) of each segment it writes; a replicated segment is in the list of one shard only.

        pool[:, slots[i], destination : destination + width] = shard[:, i, source : source + width]
    """
    checks.reorder_conv(pool, shards, slots, blocks)
    if shards[0].numel():
        _move("reorder_conv", pool, shards, slots, blocks)


def scatter_ssm(
    pool: torch.Tensor,
    shards: Sequence[torch.Tensor],
    slots: torch.Tensor,
    head_offsets: Sequence[int],
    checkpoint_stride: int = 1,
) -> None:
    """Write the heads of recurrent states into the slots of their requests.

    pool [layers, slots, heads, dv, dk]; shards: each [layers, n, heads_i, dv, dk]; slots: distinct, int64 [n];
    head_offsets: the first destination head of each shard. A pool that keeps several checkpoints per request has them
    one after the other, checkpoint_stride in number; the state goes to the first.

        pool[:, slots[i] * checkpoint_stride, offset : offset + heads_i] = shard[:, i]
    """
    checks.scatter_ssm(pool, shards, slots, head_offsets, checkpoint_stride)
    if shards[0].numel():
        _move("scatter_ssm", pool, shards, slots, head_offsets, checkpoint_stride)


def stack_layers(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view [layers, ...] over per-layer pools, or None where there is none and each layer needs a call of its own.

    There is one when the tensors agree in dtype, shape and strides and lie in one storage, in order and equally far
    apart, as the NPU pools do.
    """
    if not tensors:
        return None
    first = tensors[0]
    base = first.storage_offset()
    spacing = tensors[1].storage_offset() - base if len(tensors) > 1 else 1
    if spacing < 1:
        return None
    for layer, tensor in enumerate(tensors):
        alike = (tensor.dtype, tensor.shape, tensor.stride()) == (first.dtype, first.shape, first.stride())
        if not alike or not _same_storage(tensor, first) or tensor.storage_offset() != base + layer * spacing:
            return None
    return first.as_strided((len(tensors), *first.shape), (spacing, *first.stride()), base)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _move(operation: str, target: torch.Tensor, *arguments: Any) -> None:
    """Have an operation done where its tensors lie."""
    if target.device.type == "cpu":
        getattr(cpu, operation)(target, *arguments)
    else:
        copies = partial(getattr(naive, operation), target, *arguments)
        KERNELS.attempt(partial(by_kernels, operation, target, *arguments), copies)


def by_kernels(operation: str, *arguments: Any) -> None:
    """An operation by a kernel. Raises NoKernel where none can be built, ImportError where there is no Triton."""
    from sglang_hetero.merge import triton_ops

    getattr(triton_ops, operation)(*arguments)
