"""Assemble: a plan carried out in one rank's memory: from staging to the caches, at the source to the send buffer.

The plan says which elements. The transfer calls `merge_batch` and `pack_pages`. `merge_pages` and `merge_slot` do the
same for one piece with the operations of merge/ops.py, on views of the plan's elements where a batch has copies of
bytes: a second way from a plan to the caches, kept for what docs/core.md says. Which operation a component needs
follows from its axes, not from the name of its role.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_hetero.errors import MergeError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.bind import item_runs
from sglang_hetero.reshard.plan import Plan
from sglang_hetero.reshard.share import Share

from . import ops
from .batch import Batches, Layer, Staged, live_tokens
from .views import arranged, item_view, live_view, staged_view

Memory = Mapping[tuple[Role, int], torch.Tensor]
"""Per role and layer the bytes of the buffer from its address on: uint8, one-dimensional."""


class Assembler:
    """Moves what has arrived in staging into one decode rank's caches. No memory is allocated, only views are made."""

    def __init__(self, plan: Plan, memory: Memory) -> None:
        """memory: of every layer of every role that the plan moves. Raises MergeError if it does not fit the plan."""
        self._shares: dict[tuple[Role, int], list[Share]] = {}
        self._pools: dict[tuple[Role, int], torch.Tensor] = {}
        for share in plan.shares:
            component = share.destination_component
            for layer in share.layers:
                self._shares.setdefault((share.role, layer), []).append(share)
                if (share.role, layer) not in memory:
                    raise MergeError(f"layer {layer} of {share.role}: the plan moves it, but there is no memory for it")
                items = live_view(item_view(memory[share.role, layer], component), component)
                self._pools[share.role, layer] = arranged(items, component).unsqueeze(0)
        # What nobody sends: decode's own draft caches where prefill has none.
        self._empty: list[torch.Tensor] = []
        for component in plan.destination.components:
            for layer in component.layers if component.role in plan.missing else ():
                if (component.role, layer) not in memory:
                    raise MergeError(f"layer {layer} of {component.role}: there is no memory for it")
                self._empty.append(item_view(memory[component.role, layer], component))
        self._batches = Batches({key: Layer(own, memory[key]) for key, own in self._shares.items()})

    def merge_batch(self, arena: torch.Tensor, pieces: Sequence[Staged]) -> None:
        """Move all of these pieces of any roles and layers, which lie in `arena` (uint8, one-dimensional).

        Raises MergeError before anything is written: an area that is missing, misaligned or not inside the arena, ids
        that the pool does not have, an item that two pieces write, tokens that do not end in the last page.
        """
        self._batches.merge(arena, pieces)

    def begin_empty(self, pages: npt.NDArray[np.int64]) -> None:
        """Empty these pages (int64, ids in this rank's pool, on the host) of all that the plan lets nobody send.

        The draft model reads them from its first step on, and what lies there is another request's, or never written.
        Raises MergeError for ids that are no request's.

        By runs of pages that lie beside each other: what fills by index may copy a whole pool there and back (CANN's
        does not take every dtype, and writes through a view of all of it), and others' pages are merged meanwhile.
        """
        _check_ids(torch.from_numpy(pages))
        for run in item_runs(pages):
            for items in self._empty:
                items.narrow(0, int(run[0]), len(run)).zero_()

    def sources(self, role: Role, layer: int) -> tuple[int, ...]:
        """Numbers of the sources that have a share of this layer of a role. Raises MergeError if nothing moves it."""
        return tuple(share.source for share in self._of(role, layer))

    def item(self, role: Role, layer: int) -> Item:
        """Whether this layer of a role is moved by page or by slot. Raises MergeError if nothing moves it."""
        return self._of(role, layer)[0].item

    def merge_pages(
        self, role: Role, layer: int, pages: torch.Tensor, tokens: int, areas: Mapping[int, torch.Tensor]
    ) -> None:
        """Move one piece, whose areas may lie anywhere, into `pages` (int64, ids in this rank's pool, on its device).

        tokens: how many the pages hold; the rest of the last page is left as it is. areas: per source number the bytes
        that it wrote, uint8, one-dimensional, with room for whole pages. Raises MergeError if an area is missing or too
        small.
        """
        shares = self._of(role, layer, Item.PAGE)
        component = shares[0].destination_component
        _check_ids(pages)
        tokens = live_tokens(tokens, len(pages), component.axis(AxisName.TOKEN).size)
        shards: list[torch.Tensor] = []
        offsets: list[int] = []
        for share in shares:
            staged = arranged(staged_view(_area(areas, share, layer), share, len(pages)), component).unsqueeze(0)
            for start, destination, size in _moves(share):
                shards.append(staged.narrow(3, start, size))
                offsets.append(destination)
        moved = tokens if shares[0].moves_tail_alone else None
        ops.merge_kv(self._pools[role, layer], shards, pages, offsets, moved)

    def merge_slot(self, role: Role, layer: int, slots: torch.Tensor, areas: Mapping[int, torch.Tensor]) -> None:
        """Move one layer of a request's linear state into `slots` (int64, one id, on the pool's device).

        areas: as in merge_pages, with room for one slot.
        """
        shares = self._of(role, layer, Item.SLOT)
        component = shares[0].destination_component
        _check_ids(slots)
        if len(slots) != 1:
            raise MergeError(f"{role}: a request has one slot, {len(slots)} were given")
        staged = [
            arranged(staged_view(_area(areas, share, layer), share, len(slots)), component).unsqueeze(0)
            for share in shares
        ]
        moves = [_moves(share) for share in shares]
        if any(axis.name is AxisName.WINDOW for axis in component.axes):
            ops.reorder_conv(self._pools[role, layer], staged, slots, moves)
            return
        pairs = [(view, move) for view, own in zip(staged, moves, strict=True) for move in own]
        shards = [view.narrow(2, start, size) for view, (start, _, size) in pairs]
        offsets = [destination for _, (_, destination, _) in pairs]
        ops.scatter_ssm(self._pools[role, layer], shards, slots, offsets)

    def _of(self, role: Role, layer: int, item: Item | None = None) -> list[Share]:
        shares = self._shares.get((role, layer))
        if shares is None:
            raise MergeError(f"layer {layer} of {role} is not in the plan, so there is nothing to merge")
        if item is not None and shares[0].item is not item:
            raise MergeError(f"{role} lies in {shares[0].item}s, not in {item}s")
        return shares


def pack_pages(share: Share, memory: torch.Tensor, pages: torch.Tensor, tokens: int, buffer: torch.Tensor) -> None:
    """Gather a packed share's part of `pages` (int64, ids at the source) of one layer into `buffer`.

    memory: the layer's bytes at the source; buffer: uint8, with room for whole pages. Raises MergeError for a share
    that is sent as it lies.
    """
    if not share.packed:
        raise MergeError(f"{share.role}: what source {share.source} sends lies in one run, there is nothing to pack")
    component = share.source_component
    _check_ids(pages)
    tokens = live_tokens(tokens, len(pages), component.axis(AxisName.TOKEN).size)
    pool = arranged(item_view(memory, component), component).unsqueeze(0)
    out = arranged(staged_view(buffer, share, len(pages)), share.destination_component).unsqueeze(0)
    for block, start in zip(share.blocks, share.staged_starts, strict=True):
        ops.pack_kv(out.narrow(3, start, block.size), pool, pages, block.source, tokens)


def _moves(share: Share) -> list[tuple[int, int, int]]:
    """Per block of a share: where it begins in staging and at the destination, and its size along the cut axis."""
    return [
        (start, block.destination, block.size) for block, start in zip(share.blocks, share.staged_starts, strict=True)
    ]


def _check_ids(ids: torch.Tensor) -> None:
    """Raise MergeError unless these are ids of items; 0 is SGLang's padding. On a device values are not looked at."""
    if not isinstance(ids, torch.Tensor) or ids.dtype is not torch.int64 or ids.dim() != 1 or not len(ids):
        found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise MergeError(f"ids of pages and slots must be a row of int64, they are {found}")
    if ids.device.type == "cpu" and int(ids.min()) < 1:
        raise MergeError(f"item {int(ids.min())} is no request's: ids go from 1, 0 is padding")


def _area(areas: Mapping[int, torch.Tensor], share: Share, layer: int) -> torch.Tensor:
    try:
        return areas[share.source]
    except LookupError:
        raise MergeError(
            f"layer {layer} of {share.role}: nothing has arrived from source {share.source}; a piece is merged when "
            "all of its sources have written"
        ) from None
