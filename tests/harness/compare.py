"""Bitwise comparison that names the first element that differs."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from .expectation import Buffer
from .oracle import Bits, Component


@dataclass(frozen=True)
class Difference:
    """How one buffer of one decode rank differs from what it must hold."""

    rank: int
    component: Component
    layer: int
    name: str
    axes: tuple[str, ...]
    coordinates: tuple[int, ...]
    """First differing element, in row-major order of the buffer."""
    expected: int
    actual: int
    elements: int
    """How many elements differ."""
    items: tuple[int, ...]
    """Pages, slots or aux rows that hold a differing element."""
    foreign_items: tuple[int, ...]
    """Those among them that belong to no request of the handoff, so that must still be poison."""
    itemsize: int

    def __str__(self) -> str:
        where = ", ".join(f"{axis} {index}" for axis, index in zip(self.axes, self.coordinates, strict=True))
        digits = 2 * self.itemsize
        return (
            f"decode rank {self.rank}, {self.name} layer {self.layer}: first difference at {where}: "
            f"expected 0x{self.expected:0{digits}x}, found 0x{self.actual:0{digits}x}; {self.elements} elements differ "
            f"in {self.axes[0]}s {list(self.items)}, of which {list(self.foreign_items)} belong to no request"
        )


def first_difference(
    buffer: Buffer, rank: int, expected: Bits, actual: Bits, owned: Collection[int]
) -> Difference | None:
    """Compare two arrays of one buffer; `owned` are the items that belong to a request. None when all is equal."""
    wrong = expected != actual
    if not wrong.any():
        return None
    coordinates = tuple(int(axis) for axis in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    items = [int(item) for item in np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))]
    return Difference(
        rank=rank,
        component=buffer.component,
        layer=buffer.layer,
        name=buffer.name,
        axes=buffer.axes,
        coordinates=coordinates,
        expected=int(expected[coordinates]),
        actual=int(actual[coordinates]),
        elements=int(np.count_nonzero(wrong)),
        items=tuple(items),
        foreign_items=tuple(item for item in items if item not in owned),
        itemsize=buffer.itemsize,
    )
