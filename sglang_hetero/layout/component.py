"""What the bytes of one cache component mean, on one rank.

A component is a role (say, conv) on some layers. Each layer has a buffer of items, an item is a page or a slot, and an
item is a strided array with named axes. One axis is cut over tensor-parallel ranks: it is a row of segments, each of
which is either sharded by head or replicated. Nothing is read off shapes alone: strides are part of the description,
and so are the rows of the conv window that hold something.
"""

from enum import StrEnum
from itertools import pairwise

from . import limits
from .axes import Axis, AxisName, cut_size, describe_segments
from .checks import Struct, check_name, require, short, within

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
}
"""Bytes per element, by torch's name of the dtype."""

PLAIN = "plain"
"""Encoding of an item whose bytes are just its strided elements."""


class Role(StrEnum):
    """What a component is to the model. Names go over the wire."""

    TARGET_KEY = "target_key"
    TARGET_VALUE = "target_value"
    TARGET_LATENT = "target_latent"
    """Compressed KV of multi-head latent attention, with the rotary part behind it where one buffer holds both."""
    TARGET_ROPE = "target_rope"
    """Rotary part of latent attention where it has a buffer of its own, as on an NPU."""
    CONV = "conv"
    SSM = "ssm"
    DRAFT_KEY = "draft_key"
    DRAFT_VALUE = "draft_value"
    DRAFT_LATENT = "draft_latent"
    DRAFT_ROPE = "draft_rope"

    @property
    def draft(self) -> bool:
        """True for the draft model's caches: without them decode guesses worse, but never wrong."""
        return self in (Role.DRAFT_KEY, Role.DRAFT_VALUE, Role.DRAFT_LATENT, Role.DRAFT_ROPE)


class Item(StrEnum):
    """What a request is given of a component: pages of tokens, or one slot."""

    PAGE = "page"
    SLOT = "slot"


_SHAPES: dict[Role, tuple[Item, AxisName, frozenset[AxisName]]] = {
    **dict.fromkeys(
        (Role.TARGET_KEY, Role.TARGET_VALUE, Role.DRAFT_KEY, Role.DRAFT_VALUE),
        (Item.PAGE, AxisName.HEAD, frozenset({AxisName.TOKEN, AxisName.HEAD, AxisName.CHANNEL})),
    ),
    **dict.fromkeys(
        (Role.TARGET_LATENT, Role.TARGET_ROPE, Role.DRAFT_LATENT, Role.DRAFT_ROPE),
        (Item.PAGE, AxisName.CHANNEL, frozenset({AxisName.TOKEN, AxisName.CHANNEL})),
    ),
    Role.CONV: (Item.SLOT, AxisName.CHANNEL, frozenset({AxisName.CHANNEL, AxisName.WINDOW})),
    Role.SSM: (
        Item.SLOT,
        AxisName.HEAD,
        frozenset({AxisName.HEAD, AxisName.STATE_ROW, AxisName.STATE_COLUMN}),
    ),
}
"""Per role: what a request is given of it, the axis that is cut over ranks, and all axes. In which order the axes are
listed is for two sides to compare."""


class Component(Struct, frozen=True):
    """One role on some layers of one rank; all its layers have the same geometry.

    layers: layer ids of the model (the draft model numbers its own from 0). items: pages or slots per layer, padding
    included. item_stride: bytes. addresses: where each layer's item 0 starts in its owner's memory, in the order of
    `layers`; they are of no meaning to a fingerprint. encoding: PLAIN, or the name of an arrangement of bytes inside an
    item that only its own kernels understand, so that items can only be moved whole.
    """

    role: Role
    item: Item
    dtype: str
    layers: tuple[int, ...]
    axes: tuple[Axis, ...]
    items: int
    item_stride: int
    addresses: tuple[int, ...]
    encoding: str = PLAIN

    def __post_init__(self) -> None:
        where = f"{self.role}"
        check_name(self.dtype, f"{where}: dtype")
        require(self.dtype in ITEMSIZE, f"{where}: dtype {self.dtype!r} is none of {', '.join(sorted(ITEMSIZE))}")
        check_name(self.encoding, f"{where}: encoding")
        within(len(self.layers), 1, limits.MAX_LAYERS, f"{where}: number of layers")
        require(
            all(0 <= layer <= limits.MAX_ELEMENTS for layer in self.layers)
            and all(a < b for a, b in pairwise(self.layers)),
            f"{where}: layer ids must increase from 0 or more, they are {short(self.layers)}",
        )
        require(
            len(self.addresses) == len(self.layers),
            f"{where}: {len(self.addresses)} addresses for {len(self.layers)} layers",
        )
        within(self.items, 1, limits.MAX_ELEMENTS, f"{where}: items")
        within(self.item_stride, 1, limits.MAX_BYTES, f"{where}: item_stride")
        self._check_axes(where)
        self._check_addresses(where)

    def _check_addresses(self, where: str) -> None:
        for address in self.addresses:
            require(
                address >= 0 and address + self.buffer_span <= limits.ADDRESS_SPACE,
                f"{where}: a buffer at {address:#x} of {self.buffer_span} bytes leaves the address space",
            )
            require(address % self.itemsize == 0, f"{where}: address {address:#x} suits no {self.dtype}")
        for what, stride in (("items", self.item_stride), *((f"axis {axis.name}", axis.stride) for axis in self.axes)):
            require(
                stride % self.itemsize == 0, f"{where}: the stride of {what}, {stride} bytes, suits no {self.dtype}"
            )
        ordered = sorted(self.addresses)
        for before, after in pairwise(ordered):
            # Apart, or interleaved: in the gaps between each other's items, as where one page holds all layers.
            step = (after - before) % self.item_stride
            apart = after - before >= self.buffer_span
            require(
                apart or min(step, self.item_stride - step) >= self.item_span,
                f"{where}: the buffers of two layers, at {before:#x} and {after:#x}, overlap",
            )

    def _check_axes(self, where: str) -> None:
        within(len(self.axes), 1, limits.MAX_AXES, f"{where}: number of axes")
        names = [axis.name for axis in self.axes]
        item, cut, known = _SHAPES[self.role]
        require(self.item is item, f"{where}: a request is given it by {item}, not by {self.item}")
        require(
            frozenset(names) == known and len(names) == len(known),
            f"{where}: its axes are {', '.join(names)}, must be {', '.join(sorted(known))}",
        )
        require(
            [axis.name for axis in self.axes if axis.segments] == [cut],
            f"{where}: axis {cut}, and no other, must have segments",
        )
        if self.item is Item.PAGE:
            require(
                self.encoding != PLAIN or self._is_outermost(AxisName.TOKEN),
                f"{where}: tokens must be the outermost axis of a page in memory, so that a part of it can be moved",
            )
        dense = self.itemsize
        for axis in self.axes:
            dense *= axis.size
        require(
            self.encoding == PLAIN or dense == self.item_span,
            f"{where}: items in encoding {self.encoding} must have no gaps, {dense} bytes lie over {self.item_span}",
        )
        inner, span = "an element", self.itemsize
        for axis in reversed(self.memory_order):
            require(
                axis.size == 1 or axis.stride >= span,
                f"{where}: axis {axis.name} has a stride of {axis.stride} bytes, but {inner} takes {span}",
            )
            inner, span = f"what lies inside axis {axis.name}", span + (axis.size - 1) * axis.stride
        require(
            self.items == 1 or self.item_stride >= span,
            f"{where}: items are {self.item_stride} bytes apart, but one takes {span}",
        )

    def _is_outermost(self, name: AxisName) -> bool:
        """Whether one steps over whole parts of the item along this axis; true of an axis with nothing to step over."""
        if self.axis(name).size == 1:
            return True
        return next(axis.name for axis in self.memory_order if axis.size > 1) is name

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def memory_order(self) -> tuple[Axis, ...]:
        """Axes from the outermost in memory to the innermost; where one of a single element comes says nothing."""
        return tuple(sorted(self.axes, key=lambda axis: (-axis.stride, -axis.size)))

    @property
    def item_span(self) -> int:
        """Bytes from the first to the last of an item, gaps included."""
        return self.itemsize + sum((axis.size - 1) * axis.stride for axis in self.axes)

    @property
    def buffer_span(self) -> int:
        """Bytes from the first to the last of a layer's buffer."""
        return (self.items - 1) * self.item_stride + self.item_span

    @property
    def cut_axis(self) -> Axis:
        """The axis that is cut over tensor-parallel ranks."""
        return next(axis for axis in self.axes if axis.segments)

    def axis(self, name: AxisName) -> Axis:
        """The axis of that name; it must be there."""
        return next(axis for axis in self.axes if axis.name is name)

    def address(self, layer: int) -> int:
        """Where item 0 of that layer starts."""
        return self.addresses[self.layers.index(layer)]

    def check_sharding(self, tp: int, rank: int) -> None:
        """Raise ManifestError where the cut axis does not have the size that TP `tp` gives rank `rank`.

        Heads times ranks is not the total where heads are replicated, so the total is stated and the size derived.
        Raises TopologyError where these heads cannot be sharded over `tp` ranks at all.
        """
        axis = self.cut_axis
        expected = cut_size(axis.segments, tp, rank, self.role)
        require(
            axis.size == expected,
            f"{self.role}: axis {axis.name} has {axis.size} elements, but its segments give rank {rank} of TP {tp} "
            f"{expected}: {', '.join(describe_segments(axis.segments))}",
        )
