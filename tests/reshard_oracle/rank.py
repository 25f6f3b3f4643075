"""One rank's caches as bytes at made-up addresses, written by plain numpy, and the manifest that describes them."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_hetero.layout import Axis, AxisName, Component, Coordinates, Item, Manifest, Role, Sharding, Side
from sglang_hetero.layout import Segment as WireSegment
from tests.harness.oracle import DESTINATION_POISON, SOURCE_POISON, Bits, bits_dtype, repeated_byte

from .model import Model, Segment, Tensor, cut_elements, live_shard

Bytes = npt.NDArray[np.uint8]

BASE = 1 << 33
"""First address of a rank's memory where a test does not care: beyond 32 bits."""
SPACING = 4096
"""Unmapped bytes between two allocations at least, so that a copy past an end is seen."""
ALIGNMENT = 64


@dataclass(frozen=True)
class Format:
    """How a pool lies in memory. Gaps are elements.

    interleaved: all layers of an item lie together, so that an item's neighbour in memory is another layer's.
    order: axes of an item from the outermost in memory, as indices of the described ones; None is the described order.
    item_gap: after each item. row_gap: after each step of the outermost axis, so that an item is not one run of bytes.
    dead_before, dead_after: rows of the conv window that hold nothing, before and after the live ones.
    """

    interleaved: bool = False
    order: tuple[int, ...] | None = None
    item_gap: int = 0
    row_gap: int = 0
    dead_before: int = 0
    dead_after: int = 0
    encoding: str = "plain"


DENSE = Format()
CHANNELS_FIRST = DENSE
WINDOW_FIRST = Format(order=(1, 0))
"""[slots, window, channels] in memory: the NPU's conv pool, and SGLang's AMX one seen as [slots, channels, window]."""


@dataclass(frozen=True)
class Shape:
    """What a server's start decides. pages and slots are without the padding item 0."""

    page_size: int = 2
    pages: int = 6
    slots: int = 3
    formats: Mapping[Role, Format] = field(default_factory=dict)
    base: int = BASE


@dataclass(frozen=True)
class Buffer:
    """One layer of one role: `items` is [items, *axes as described], a view of the rank's bytes."""

    tensor: Tensor
    layer: int
    items: Bits
    address: int
    live: tuple[slice, ...]
    """The live part of an item."""


class Rank:
    """A rank with all its caches poisoned. `model`: the layers that it holds."""

    def __init__(self, model: Model, side: Side, coordinates: Coordinates, shape: Shape) -> None:
        self.model, self.side, self.coordinates, self.shape = model, side, coordinates, shape
        self.poison = SOURCE_POISON if side is Side.PREFILL else DESTINATION_POISON
        self.buffers: dict[tuple[Role, int], Buffer] = {}
        self.allocations: list[tuple[int, Bytes]] = []
        self._next = shape.base
        for tensor in model:
            self._place(tensor)
        self._starts = [start for start, _ in self.allocations]
        components = tuple(self._describe(tensor) for tensor in model)
        self.manifest = Manifest(
            side=side,
            host=f"{side}-host",
            coordinates=coordinates,
            page_size=shape.page_size,
            model="oracle",
            incarnation=f"{side} {coordinates}",
            sglang="0.5.23",
            components=components,
        )

    def _format(self, tensor: Tensor) -> Format:
        return self.shape.formats.get(tensor.role, DENSE)

    def _allocate(self, nbytes: int) -> tuple[int, Bytes]:
        memory = np.full(nbytes, self.poison, dtype=np.uint8)
        address = self._next
        self.allocations.append((address, memory))
        self._next = -(-(address + nbytes + SPACING) // ALIGNMENT) * ALIGNMENT
        return address, memory

    def _place(self, tensor: Tensor) -> None:
        shape, form, size = self.shape, self._format(tensor), tensor.itemsize
        items = 1 + (shape.pages if tensor.item is Item.PAGE else shape.slots)
        sizes, live = [], []
        for name, size_of_axis in tensor.axes:
            if name is tensor.cut:
                extent = len(cut_elements(tensor, self.coordinates.tp_size, self.coordinates.tp_rank)[0])
            else:
                extent = shape.page_size if size_of_axis is None else size_of_axis
            dead = (form.dead_before, form.dead_after) if name is AxisName.WINDOW else (0, 0)
            sizes.append(dead[0] + extent + dead[1])
            live.append(slice(dead[0], dead[0] + extent))
        order = form.order or tuple(range(len(sizes)))
        strides, step = [0] * len(sizes), size
        for index in reversed(order):
            step += form.row_gap * size if index == order[0] else 0
            strides[index] = step
            step *= sizes[index]
        item = step + form.item_gap * size
        layers = len(tensor.layers)
        between = layers * item if form.interleaved else item
        if form.interleaved:
            address, memory = self._allocate(items * between)
            places = [(address + number * item, memory, number * item) for number in range(layers)]
        else:
            places = [(*self._allocate(items * between), 0) for _ in range(layers)]
        for layer, (address, memory, offset) in zip(tensor.layers, places, strict=True):
            view = np.ndarray([items, *sizes], bits_dtype(size), memory.data, offset, [between, *strides])
            self.buffers[tensor.role, layer] = Buffer(tensor, layer, view, address, tuple(live))

    def _describe(self, tensor: Tensor) -> Component:
        """The component as the owner of such pools would describe it: shapes and strides are read off the arrays."""
        buffers = [self.buffers[tensor.role, layer] for layer in tensor.layers]
        items, live = buffers[0].items, buffers[0].live
        axes = []
        for (name, _), size, stride, rows in zip(tensor.axes, items.shape[1:], items.strides[1:], live, strict=True):
            segments = tuple(WireSegment(s.name, s.heads, s.width, _sharding(s)) for s in tensor.segments)
            partly = (rows.start, rows.stop - rows.start) if rows.stop - rows.start < size else None
            axes.append(Axis(name, size, stride, segments if name is tensor.cut else (), partly))
        return Component(
            role=tensor.role,
            item=tensor.item,
            dtype=tensor.dtype,
            layers=tensor.layers,
            axes=tuple(axes),
            items=len(items),
            item_stride=items.strides[0],
            addresses=tuple(buffer.address for buffer in buffers),
            encoding=self._format(tensor).encoding,
        )

    def write(
        self,
        seed: int,
        pages: Sequence[int],
        slot: int,
        tokens: int,
        *,
        skip: frozenset[Role] = frozenset(),
        only: Callable[[Role, int], bool] = lambda role, layer: True,
    ) -> None:
        """Put a request where it belongs: what a prefill rank has computed, or what a decode rank must end up with.

        only: says of a role and a layer whether they are written.
        """
        tp, rank, page_size = self.coordinates.tp_size, self.coordinates.tp_rank, self.shape.page_size
        for (role, layer), buffer in self.buffers.items():
            if role in skip or not only(role, layer):
                continue
            live = live_shard(buffer.tensor, seed, layer, tokens, tp=tp, rank=rank)
            if buffer.tensor.item is Item.SLOT:
                buffer.items[(slot, *buffer.live)] = live
                continue
            token_axis = [name for name, _ in buffer.tensor.axes].index(AxisName.TOKEN)
            live = np.moveaxis(live, token_axis, 0)
            for number, page in enumerate(pages):
                rows = live[number * page_size : (number + 1) * page_size]
                np.moveaxis(buffer.items[page], token_axis, 0)[: len(rows)] = rows

    def fill_tail(self, role: Role, page: int, used: int, byte: int) -> None:
        """Put `byte` behind the first `used` tokens of a page: what travels where a page can only be moved whole."""
        for (name, _), buffer in self.buffers.items():
            if name is role:
                buffer.items[page, used:] = repeated_byte(byte, buffer.tensor.itemsize)

    def bytes_from(self, address: int) -> Bytes:
        """The bytes at an address up to the end of its allocation."""
        index = bisect_right(self._starts, address) - 1
        assert index >= 0, f"address {address:#x} is before all memory of {self.manifest.label}"
        start, memory = self.allocations[index]
        assert address < start + len(memory), f"address {address:#x} is not mapped in {self.manifest.label}"
        return memory[address - start :]

    def read(self, address: int, size: int) -> Bytes:
        """`size` bytes at an address, which must all be in one allocation."""
        found = self.bytes_from(address)[:size]
        assert len(found) == size, f"{size} bytes at {address:#x} leave the buffer on {self.manifest.label}"
        return found


def _sharding(segment: Segment) -> Sharding:
    if segment.replicated:
        return Sharding.REPLICATED
    return Sharding.DIVIDED if segment.divided else Sharding.BY_HEAD


def first_difference(expected: Rank, actual: Rank) -> str | None:
    """The first element that differs, in words, or the first byte outside all elements; None if every byte is equal."""
    for key, wanted in expected.buffers.items():
        found = actual.buffers[key]
        wrong = wanted.items != found.items
        if wrong.any():
            place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            names = [str(wanted.tensor.item), *(name for name, _ in wanted.tensor.axes)]
            where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=True))
            digits = 2 * wanted.tensor.itemsize
            return (
                f"{actual.manifest.label}, {key[0]} layer {key[1]}: first difference at {where}: expected "
                f"0x{int(wanted.items[place]):0{digits}x}, found 0x{int(found.items[place]):0{digits}x}; "
                f"{int(wrong.sum())} elements differ"
            )
    for (address, wanted_bytes), (_, found_bytes) in zip(expected.allocations, actual.allocations, strict=True):
        differing = np.flatnonzero(wanted_bytes != found_bytes)
        if len(differing):
            at = int(differing[0])
            return (
                f"{actual.manifest.label}: byte {at} of the buffer at {address:#x}, in no element, was "
                f"0x{wanted_bytes[at]:02x}, is 0x{found_bytes[at]:02x}"
            )
    return None
