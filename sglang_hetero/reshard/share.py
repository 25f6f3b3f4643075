"""What one source rank sends of one component, and how it lies in staging: geometry without a request.

The contribution of a source to an item is the same item with a shorter cut axis: the blocks that this source is elected
to send, one after another, and of a conv window only its live rows. In staging it is dense, in the source's own memory
order. So what the source reads, from low to high addresses, is what staging holds from its start, without gaps; a
contribution that is one run of bytes at the source goes over in one piece.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_hetero.layout.axes import Axis, AxisName
from sglang_hetero.layout.component import PLAIN, Component, Item, Role

Offsets = npt.NDArray[np.uint64]
"""Addresses, offsets or sizes in bytes."""


@dataclass(frozen=True)
class Block:
    """A run of elements along the cut axis that goes from one rank to another. All counts are elements."""

    source: int
    destination: int
    size: int


@dataclass(frozen=True)
class StagedAxis:
    """One axis of a contribution in staging: elements, and bytes between neighbours."""

    name: AxisName
    size: int
    stride: int


@dataclass(frozen=True)
class Runs:
    """The bytes of a contribution at the source: `sizes[i]` bytes at `offsets[i]` from the start of the item."""

    offsets: Offsets
    sizes: Offsets


@dataclass(frozen=True)
class Share:
    """What source rank number `source` of a plan sends of some layers of one role to the destination.

    blocks are in source order and do not touch each other in both ranks at once.
    """

    source: int
    role: Role
    layers: tuple[int, ...]
    blocks: tuple[Block, ...]
    source_component: Component
    destination_component: Component

    @property
    def item(self) -> Item:
        """Whether this is moved by page or by slot."""
        return self.source_component.item

    @cached_property
    def staged_axes(self) -> tuple[StagedAxis, ...]:
        """The contribution in staging, the outermost axis first."""
        component = self.source_component
        axes, stride = [], component.itemsize
        for axis in reversed(component.memory_order):
            size = sum(block.size for block in self.blocks) if axis.segments else axis.live_rows[1]
            axes.append(StagedAxis(axis.name, size, stride))
            stride *= size
        return tuple(reversed(axes))

    @cached_property
    def staged_bytes(self) -> int:
        """Bytes of one whole item's contribution."""
        outer = self.staged_axes[0]
        return outer.size * outer.stride

    @property
    def staged_starts(self) -> tuple[int, ...]:
        """Where each block begins along the cut axis of the contribution, in elements."""
        starts, start = [], 0
        for block in self.blocks:
            starts.append(start)
            start += block.size
        return tuple(starts)

    @cached_property
    def runs(self) -> Runs:
        """The fewest runs of source bytes that make up a whole item."""
        return self._runs(None)

    @cached_property
    def packed(self) -> bool:
        """True if the source gathers the contribution into a buffer of its own first and sends that.

        A page of which only some heads are wanted is a run of a few hundred bytes per token: upstream's half a million
        pieces. A slot has at most a few runs per conv segment and window row, which are sent as they are.
        """
        runs = self.runs
        entire = len(runs.sizes) == 1 and int(runs.sizes[0]) == self.source_component.item_span
        return self.item is Item.PAGE and not entire

    @property
    def moves_tail_alone(self) -> bool:
        """True if of a last page only the tokens in use are moved; False where bytes inside a page are opaque."""
        return self.source_component.encoding == PLAIN

    def token_bytes(self) -> int:
        """Bytes of one token in a page's contribution."""
        return next(axis.stride for axis in self.staged_axes if axis.name is AxisName.TOKEN)

    def tail_runs(self, tokens: int) -> Runs:
        """The runs of a last page of which only `tokens` are used; whole pages where bytes inside are opaque."""
        if not self.moves_tail_alone:
            return self.runs
        return self._runs(tokens)

    def tail_bytes(self, tokens: int) -> int:
        """Bytes of the contribution of a page of which only `tokens` are used."""
        if not self.moves_tail_alone or tokens == self.source_component.axis(AxisName.TOKEN).size:
            return self.staged_bytes
        return tokens * self.token_bytes()

    @property
    def run_count(self) -> int:
        """How many runs `runs` will have at most, without finding them."""
        count, size = 1, self.source_component.itemsize
        for axis in reversed(self.source_component.memory_order):
            ranges = self._ranges(axis, None)
            if count == 1 and size == axis.stride:
                count, size = len(ranges), min(length for _, length in ranges) * size
            else:
                count *= sum(length for _, length in ranges)
        return count

    def _runs(self, tokens: int | None) -> Runs:
        component = self.source_component
        runs = Runs(np.zeros(1, dtype=np.uint64), np.full(1, component.itemsize, dtype=np.uint64))
        for axis in reversed(component.memory_order):
            ranges, stride = self._ranges(axis, tokens), np.uint64(axis.stride)
            if len(runs.sizes) == 1 and runs.sizes[0] == stride:
                # What lies inside is dense: whole ranges are runs, no element needs to be looked at.
                starts = np.array([first for first, _ in ranges], dtype=np.uint64) * stride
                lengths = np.array([length for _, length in ranges], dtype=np.uint64) * stride
                runs = coalesce(starts + runs.offsets[0], lengths)
            else:
                steps = [np.arange(first, first + length, dtype=np.uint64) for first, length in ranges]
                starts = np.concatenate(steps) * stride
                runs = coalesce((starts[:, None] + runs.offsets[None, :]).reshape(-1), np.tile(runs.sizes, len(starts)))
        return runs

    def _ranges(self, axis: Axis, tokens: int | None) -> list[tuple[int, int]]:
        """First and number of the elements along an axis that belong to the contribution, in order."""
        if axis.segments:
            return [(block.source, block.size) for block in self.blocks]
        first, count = axis.live_rows
        if axis.name is AxisName.TOKEN and tokens is not None:
            count = tokens
        return [(first, count)]


def coalesce(offsets: Offsets, sizes: Offsets) -> Runs:
    """Join neighbours of which one begins where the one before it ends."""
    if len(offsets) == 0:
        return Runs(offsets, sizes)
    starts = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1] + sizes[:-1]))
    return Runs(offsets[starts], np.add.reduceat(sizes, starts))
