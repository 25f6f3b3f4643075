"""What a share moves, as strided copies in bytes: numbers only, made once for each layer and position of the areas.

A copy is an array of elements with a stride per axis on either side. `fold` joins the copies of several sources and
blocks into fewer with one axis more; `rectangle` turns one into what a kernel moves: rows of dense bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from sglang_hetero.layout.axes import AxisName
from sglang_hetero.reshard.share import Share

Ints = tuple[int, ...]


@dataclass(frozen=True)
class StridedCopy:
    """Elements of every item of a piece. All but shape and itemsize are bytes.

    target: of the first element in an item of the cache; source: of that of the first item, from the piece's first
    area. *_item: from one item to the next. shape, *_steps: per axis the elements and the distance of neighbours; the
    first axis of a page is its tokens.
    """

    itemsize: int
    target: int
    source: int
    target_item: int
    source_item: int
    shape: Ints
    target_steps: Ints
    source_steps: Ints


@dataclass(frozen=True)
class Rectangle:
    """A copy as rows of `cols` dense bytes, of which an item has `rows` in each of several places.

    target_row, source_row: bytes from row to row. places: where first rows are, (target, source), as in StridedCopy.
    """

    rows: int
    cols: int
    target_row: int
    source_row: int
    target_item: int
    source_item: int
    places: tuple[tuple[int, int], ...]

    @property
    def joins(self) -> bool:
        """Whether the rows of items that follow each other are one run of rows on both sides."""
        return (self.target_item, self.source_item) == (self.rows * self.target_row, self.rows * self.source_row)


def copies_of(share: Share, area: int) -> list[StridedCopy]:
    """One copy per block of a share whose area begins `area` bytes behind the piece's first."""
    component = share.destination_component
    staged = {axis.name: axis for axis in share.staged_axes}
    # In the order of the cache's memory, so that it is written from low to high addresses; tokens are outermost anyway.
    axes = sorted(component.memory_order, key=lambda axis: axis.name is not AxisName.TOKEN)
    cut = component.cut_axis
    lead = sum(axis.live_rows[0] * axis.stride for axis in axes)
    return [
        StridedCopy(
            itemsize=component.itemsize,
            target=lead + block.destination * cut.stride,
            source=area + start * staged[cut.name].stride,
            target_item=component.item_stride,
            source_item=share.staged_bytes,
            shape=tuple(block.size if axis is cut else axis.live_rows[1] for axis in axes),
            target_steps=tuple(axis.stride for axis in axes),
            source_steps=tuple(staged[axis.name].stride for axis in axes),
        )
        for block, start in zip(share.blocks, share.staged_starts, strict=True)
    ]


def layer_copies(shares: Iterable[Share], areas: Mapping[int, int]) -> list[StridedCopy]:
    """Of all shares of a layer. areas: per source number the place of its area, from the first of them."""
    return [copy for share in shares for copy in copies_of(share, areas[share.source])]


def fold(copies: Sequence[StridedCopy], axis: int) -> list[StridedCopy]:
    """The same elements in as few copies as evenly spaced ones can be joined to, each join a new axis at `axis`.

    The heads that two sources sent then go into a page in one copy, which writes the page from its start to its end.
    Two copies would write every second row each and touch all of the page twice: 0.82 of a memcpy's speed instead of
    0.96.
    """
    while True:
        joined = _fold_once(sorted(copies, key=lambda copy: copy.target), axis)
        if len(joined) == len(copies):
            return joined
        copies = joined


def _fold_once(copies: Sequence[StridedCopy], axis: int) -> list[StridedCopy]:
    found: list[StridedCopy] = []
    start = 0
    while start < len(copies):
        first, end = copies[start], start + 1
        if end < len(copies):
            target, source = copies[end].target - first.target, copies[end].source - first.source
            while end < len(copies) and copies[end] == replace(
                first, target=first.target + (end - start) * target, source=first.source + (end - start) * source
            ):
                end += 1
        if end > start + 1:
            first = replace(
                first,
                shape=_insert(first.shape, axis, end - start),
                target_steps=_insert(first.target_steps, axis, target),
                source_steps=_insert(first.source_steps, axis, source),
            )
        found.append(first)
        start = end
    return found


def _insert(values: Ints, at: int, value: int) -> Ints:
    return (*values[:at], value, *values[at:])


def rectangle(copy: StridedCopy, *, by_token: bool) -> Rectangle | None:
    """A copy for the kernel; None where only single elements are dense on both sides, as between two orders of axes.

    by_token: the first axis makes the rows, so that a part of the last page can be moved. Otherwise it is the axis with
    the most elements, among those that are not dense.
    """
    axes = list(zip(copy.shape, copy.target_steps, copy.source_steps, strict=True))
    fixed = [axes.pop(0)] if by_token else []
    cols = copy.itemsize
    rest: list[tuple[int, int, int]] = []  # joined where they are evenly spaced, the innermost first
    for size, target, source in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        inner = rest[-1] if rest else None
        if inner is None and target == source == cols:
            cols *= size
        elif inner is not None and (target, source) == (inner[0] * inner[1], inner[0] * inner[2]):
            rest[-1] = (inner[0] * size, *inner[1:])
        else:
            rest.append((size, target, source))
    if cols == copy.itemsize and prod(copy.shape) > 1:
        return None
    if not fixed:
        fixed = [max(rest, default=(1, 0, 0))]
        rest = [axis for axis in rest if axis is not fixed[0]]
    [(rows, target_row, source_row)] = fixed
    steps = product(*(range(size) for size, _, _ in rest))
    places = tuple(
        (
            copy.target + sum(step * axis[1] for step, axis in zip(at, rest, strict=True)),
            copy.source + sum(step * axis[2] for step, axis in zip(at, rest, strict=True)),
        )
        for at in steps
    )
    return Rectangle(rows, cols, target_row, source_row, copy.target_item, copy.source_item, places)
