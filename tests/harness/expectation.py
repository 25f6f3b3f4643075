"""What every byte of one rank's pools must be, given the requests that were handed to it. numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from sglang_hetero.layout.window import ConvLayout

from . import oracle
from .oracle import Bits, Component
from .sides import Shard

PAGED = {Component.KEY, Component.VALUE, Component.DRAFT_KEY, Component.DRAFT_VALUE}
"""Components whose items are pages; the items of CONV and SSM are linear-state slots, those of AUX aux rows."""

DRAFT = {Component.DRAFT_KEY, Component.DRAFT_VALUE}

READY_FLAG = "bootstrap_room"
"""Aux buffer whose nonzero first column tells decode that the row has arrived: it starts as 0, not as poison."""


class Leftovers(Enum):
    """What a transfer does with bytes that are inside a page or a slot and belong to no token: the tail of the last
    page, and the dead rows of a window-first conv slot."""

    COPIED = "copied"
    """Whole pages and whole slots travel (upstream, equal TP)."""
    UNTOUCHED = "untouched"
    """Only live elements are written."""


@dataclass(frozen=True)
class Buffer:
    """One tensor of a pool: `shape[0]` items (pages, slots or aux rows) of elements of `itemsize` bytes."""

    component: Component
    layer: int
    """Global layer id; in the draft pool and in the aux rows the number of the buffer."""
    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Placement:
    """Where one side keeps a request. Equal on all ranks of a side, as in SGLang."""

    room: int
    seed: int
    tokens: int
    pages: tuple[int, ...]
    slot: int
    aux_row: int
    drafted: bool | None = None
    """Whether prefill has a draft; None: like decode."""

    def items(self, component: Component) -> tuple[int, ...]:
        """Items of a buffer of this component that belong to the request."""
        if component in PAGED:
            return self.pages
        return (self.aux_row,) if component is Component.AUX else (self.slot,)


def expected(buffer: Buffer, shard: Shard, placements: Sequence[Placement], leftovers: Leftovers) -> Bits:
    """Contents of a decode rank's buffer after the requests arrived: their shards, and poison everywhere else."""
    everything = np.empty(buffer.shape, dtype=oracle.bits_dtype(buffer.itemsize))
    everything[...] = untouched(buffer, oracle.DESTINATION_POISON)
    for placement in placements:
        if buffer.component in PAGED:
            _put_pages(everything, buffer, shard, placement, leftovers)
        elif buffer.component is Component.AUX:
            _put_aux(everything, buffer, shard, placement)
        else:
            _put_state(everything, buffer, shard, placement, leftovers)
    return everything


def untouched(buffer: Buffer, poison: int) -> int:
    """Element that a buffer is filled with before a transfer."""
    return 0 if buffer.name == READY_FLAG else oracle.repeated_byte(poison, buffer.itemsize)


def kv(buffer: Buffer, shard: Shard, seed: int, positions: range) -> Bits:
    """Elements of one paged buffer for a range of positions: `[positions, local heads, head_dim]`."""
    return oracle.kv_shard(
        shard.geometry, seed, buffer.component, buffer.layer, positions, tp=shard.tp, rank=shard.rank
    )


def state(buffer: Buffer, shard: Shard, seed: int) -> Bits:
    """Elements of one conv or SSM slot."""
    cut = oracle.conv_shard if buffer.component is Component.CONV else oracle.ssm_shard
    return cut(shard.geometry, seed, buffer.layer, tp=shard.tp, rank=shard.rank)


def _put_pages(everything: Bits, buffer: Buffer, shard: Shard, placement: Placement, leftovers: Leftovers) -> None:
    page_size = shard.geometry.page_size
    if buffer.component in DRAFT and placement.drafted is False:
        everything[list(placement.pages)] = 0
        return
    tokens = kv(buffer, shard, placement.seed, range(placement.tokens))
    for index, page in enumerate(placement.pages):
        part = tokens[index * page_size : (index + 1) * page_size]
        everything[page, : len(part)] = part
        if leftovers is Leftovers.COPIED:
            everything[page, len(part) :] = untouched(buffer, oracle.SOURCE_POISON)


def _put_state(everything: Bits, buffer: Buffer, shard: Shard, placement: Placement, leftovers: Leftovers) -> None:
    slot = state(buffer, shard, placement.seed)
    geometry = shard.geometry
    window_first = buffer.component is Component.CONV and geometry.conv_layout is ConvLayout.WINDOW_FIRST
    dead_rows = geometry.window - geometry.live_window if window_first and leftovers is Leftovers.UNTOUCHED else 0
    everything[placement.slot, dead_rows:] = slot[dead_rows:]


def _put_aux(everything: Bits, buffer: Buffer, shard: Shard, placement: Placement) -> None:
    if placement.drafted not in (None, bool(shard.geometry.draft_tokens)):
        begun = oracle.begun_drafts(placement.seed).get(buffer.name)
        if begun is not None:
            everything[placement.aux_row] = begun.filling
            everything[placement.aux_row, 0] = begun.first
            return
    # SGLang moves whole aux rows, so the columns nobody wrote arrive with the source's filling.
    everything[placement.aux_row] = untouched(buffer, oracle.SOURCE_POISON)
    written = oracle.aux_fields(shard.geometry, placement.seed, placement.room).get(buffer.name)
    if written is not None:
        everything[placement.aux_row, : len(written)] = written
