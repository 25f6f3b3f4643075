"""Assemble: a plan carried out in one rank's memory: from staging to the caches, at the source to the send buffer.

The plan says which elements; the operations of merge/ops.py move them. Which operation a component needs follows from
its axes, not from the name of its role.
"""

from collections.abc import Mapping

import torch

from sglang_hetero.errors import BindError
from sglang_hetero.layout.component import AxisName, Role
from sglang_hetero.reshard.plan import Plan
from sglang_hetero.reshard.share import Share

from . import ops
from .views import cut_dimension, item_view, live_view, paged_view, staged_view

Memory = Mapping[tuple[Role, int], torch.Tensor]
"""Per role and layer the bytes of the buffer from its address on: uint8, one-dimensional."""


class Assembler:
    """Moves what has arrived in staging into one decode rank's caches. Views are made once, nothing is allocated."""

    def __init__(self, plan: Plan, memory: Memory) -> None:
        self._shares: dict[tuple[Role, int], list[Share]] = {}
        self._pools: dict[tuple[Role, int], torch.Tensor] = {}
        for share in plan.shares:
            for layer in share.layers:
                self._shares.setdefault((share.role, layer), []).append(share)
                component = share.destination_component
                self._pools[share.role, layer] = item_view(memory[share.role, layer], component)

    def sources(self, role: Role, layer: int) -> tuple[int, ...]:
        """Numbers of the sources that have a share of this layer of this role."""
        return tuple(share.source for share in self._shares[role, layer])

    def merge_pages(
        self, role: Role, layer: int, pages: torch.Tensor, tokens: int, areas: Mapping[int, torch.Tensor]
    ) -> None:
        """Move a piece into `pages` (int64, ids in this rank's pool, on the pool's device).

        tokens: how many the pages hold; the rest of the last page is left as it is. areas: per source number the bytes
        that it wrote, uint8, one-dimensional. Raises BindError if a source's area is missing.
        """
        shares = self._shares[role, layer]
        component = shares[0].destination_component
        pool = paged_view(self._pools[role, layer], component).unsqueeze(0)
        count = len(pages)
        shards: list[torch.Tensor] = []
        offsets: list[int] = []
        for share in shares:
            staged = staged_view(_area(areas, share, layer), share, count)
            staged = paged_view(staged, component).unsqueeze(0)
            for block, start in zip(share.blocks, share.staged_starts, strict=True):
                shards.append(staged.narrow(3, start, block.size))
                offsets.append(block.destination)
        whole = count * component.axis(AxisName.TOKEN).size
        moved = tokens if shares[0].moves_tail_alone else whole
        ops.merge_kv(pool, shards, pages, offsets, moved)

    def merge_slot(self, role: Role, layer: int, slots: torch.Tensor, areas: Mapping[int, torch.Tensor]) -> None:
        """Move one layer of a request's linear state into `slots` (int64, one id, on the pool's device)."""
        shares = self._shares[role, layer]
        component = shares[0].destination_component
        pool = live_view(self._pools[role, layer], component).unsqueeze(0)
        staged = [staged_view(_area(areas, share, layer), share, 1).unsqueeze(0) for share in shares]
        if any(axis.name is AxisName.WINDOW for axis in component.axes):
            blocks = [
                [
                    (start, block.destination, block.size)
                    for block, start in zip(share.blocks, share.staged_starts, strict=True)
                ]
                for share in shares
            ]
            ops.reorder_conv(pool, staged, slots, blocks)
            return
        shards, offsets = [], []
        for share, view in zip(shares, staged, strict=True):
            for block, start in zip(share.blocks, share.staged_starts, strict=True):
                shards.append(view.narrow(1 + cut_dimension(component), start, block.size))
                offsets.append(block.destination)
        ops.scatter_ssm(pool, shards, slots, offsets)


def pack_pages(share: Share, memory: torch.Tensor, pages: torch.Tensor, tokens: int, buffer: torch.Tensor) -> None:
    """Gather a packed share's part of `pages` (int64, ids at the source) of one layer into `buffer`.

    memory: the layer's bytes at the source; buffer: uint8, with room for whole pages. Raises BindError for a share that
    is sent as it lies.
    """
    if not share.packed:
        raise BindError(f"{share.role}: what source {share.source} sends lies in one run, there is nothing to pack")
    component = share.source_component
    pool = paged_view(item_view(memory, component), component).unsqueeze(0)
    out = paged_view(staged_view(buffer, share, len(pages)), share.destination_component).unsqueeze(0)
    for block, start in zip(share.blocks, share.staged_starts, strict=True):
        ops.pack_kv(out.narrow(3, start, block.size), pool, pages, block.source, tokens)


def _area(areas: Mapping[int, torch.Tensor], share: Share, layer: int) -> torch.Tensor:
    try:
        return areas[share.source]
    except KeyError:
        raise BindError(
            f"layer {layer} of {share.role}: nothing has arrived from source {share.source}; a piece is merged when "
            "all of its sources have written"
        ) from None
