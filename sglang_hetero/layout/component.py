"""What the bytes of one cache component mean, on one rank.

A component is a role (say, conv) on some layers. Each layer has a buffer of items, an item is a page or a slot, and an
item is a strided array with named axes. One axis is cut over tensor-parallel ranks: it is a row of segments, each of
which is either sharded by head or replicated. Nothing is read off shapes alone: strides are part of the description,
and so are the rows of the conv window that hold something.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec

from sglang_hetero.errors import ManifestError

from . import limits
from .sharding import check_divided, check_shardable, head_interval

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


class Sharding(StrEnum):
    """How a segment is cut over tensor-parallel ranks."""

    BY_HEAD = "by_head"
    """Runs of heads; with more ranks than heads, neighbours hold the same one: key-value heads."""
    DIVIDED = "divided"
    """Runs of heads, each on one rank only, so that the number of ranks divides that of heads: linear attention."""
    REPLICATED = "replicated"
    """All of it on every rank."""


class AxisName(StrEnum):
    """Names of axes. Both sides must list the same ones in the same order, whatever their strides."""

    TOKEN = "token"
    HEAD = "head"
    CHANNEL = "channel"
    WINDOW = "window"
    """Inputs of the causal convolution, oldest first."""
    STATE_ROW = "state_row"
    """Value channel of an SSM state, head channel in Mamba-2."""
    STATE_COLUMN = "state_column"
    """Key channel of an SSM state, state index in Mamba-2."""


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


def check_name(value: str, what: str) -> None:
    """Raise ManifestError unless a text from a peer may be shown in a message or a log as it is."""
    if not 1 <= len(value) <= limits.MAX_NAME:
        raise ManifestError(f"{what} has {len(value)} characters, must have 1 to {limits.MAX_NAME}")
    if not value.isprintable():
        raise ManifestError(f"{what} is {value!r}, with characters that cannot be printed")


def short(values: Sequence[int], limit: int = 12) -> str:
    """The first few numbers of a long row, for messages."""
    shown = ", ".join(str(value) for value in values[:limit])
    return (shown + (f", ... ({len(values)})" if len(values) > limit else "")) or "none"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(message)


def _within(value: int, low: int, high: int, what: str) -> None:
    _require(low <= value <= high, f"{what} is {value}, must be {low} to {high}")


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that goes over the wire: immutable, and nothing but the named fields."""


class Segment(Struct, frozen=True):
    """A run of whole heads along the cut axis, for example the q channels of a conv state.

    heads and width (elements per head) are those of the whole model, before any sharding.
    """

    name: str
    heads: int
    width: int
    sharding: Sharding = Sharding.BY_HEAD

    def __post_init__(self) -> None:
        check_name(self.name, "a segment's name")
        _within(self.heads, 1, limits.MAX_ELEMENTS, f"segment {self.name}: heads")
        _within(self.width, 1, limits.MAX_ELEMENTS, f"segment {self.name}: width")

    def local_heads(self, tp: int, rank: int) -> range:
        """Global heads that this rank holds."""
        if self.sharding is Sharding.REPLICATED:
            return range(self.heads)
        return head_interval(self.heads, tp, rank)

    def local_size(self, tp: int, rank: int) -> int:
        """Elements along the axis on this rank."""
        return len(self.local_heads(tp, rank)) * self.width

    def check_tp(self, tp: int, what: str) -> None:
        """Raise TopologyError, beginning with `what`, where these heads cannot be sharded over `tp` ranks."""
        if self.sharding is Sharding.BY_HEAD:
            check_shardable(self.heads, tp, f"{what}, segment {self.name}")
        elif self.sharding is Sharding.DIVIDED:
            check_divided(self.heads, tp, f"{what}, segment {self.name}")


def cut_size(segments: Iterable[Segment], tp: int, rank: int, what: str) -> int:
    """Elements of these segments together on one rank. Raises TopologyError as Segment.check_tp does."""
    size = 0
    for segment in segments:
        segment.check_tp(tp, what)
        size += segment.local_size(tp, rank)
    return size


class Axis(Struct, frozen=True):
    """One axis of an item as it lies on this rank: `size` elements, `stride` bytes apart.

    segments: set on the one axis that is cut over ranks. live: first row and number of rows that hold something, where
    that is not all of them (conv windows with room for draft tokens).
    """

    name: AxisName
    size: int
    stride: int
    segments: tuple[Segment, ...] = ()
    live: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _within(self.size, 1, limits.MAX_ELEMENTS, f"axis {self.name}: size")
        _within(self.stride, 1, limits.MAX_BYTES, f"axis {self.name}: stride")
        _within(len(self.segments), 0, limits.MAX_SEGMENTS, f"axis {self.name}: number of segments")
        if self.live is not None:
            first, count = self.live
            _require(
                first >= 0 and count >= 1 and first + count <= self.size,
                f"axis {self.name}: live rows {first} to {first + count - 1} are not within its {self.size}",
            )
            _require(not self.segments, f"axis {self.name}: the cut axis has no live rows, all of it is live")

    @property
    def live_rows(self) -> tuple[int, int]:
        """First row and number of rows that hold something."""
        return self.live if self.live is not None else (0, self.size)


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
        _require(self.dtype in ITEMSIZE, f"{where}: dtype {self.dtype!r} is none of {', '.join(sorted(ITEMSIZE))}")
        check_name(self.encoding, f"{where}: encoding")
        _within(len(self.layers), 1, limits.MAX_LAYERS, f"{where}: number of layers")
        _require(
            all(0 <= layer <= limits.MAX_ELEMENTS for layer in self.layers)
            and all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False)),
            f"{where}: layer ids must increase from 0 or more, they are {short(self.layers)}",
        )
        _require(
            len(self.addresses) == len(self.layers),
            f"{where}: {len(self.addresses)} addresses for {len(self.layers)} layers",
        )
        _within(self.items, 1, limits.MAX_ELEMENTS, f"{where}: items")
        _within(self.item_stride, 1, limits.MAX_BYTES, f"{where}: item_stride")
        self._check_axes(where)
        self._check_addresses(where)

    def _check_addresses(self, where: str) -> None:
        _require(len(set(self.addresses)) == len(self.addresses), f"{where}: two layers lie at one address")
        for address in self.addresses:
            _require(
                address >= 0 and address + self.buffer_span <= limits.ADDRESS_SPACE,
                f"{where}: a buffer at {address:#x} of {self.buffer_span} bytes leaves the address space",
            )
            _require(address % self.itemsize == 0, f"{where}: address {address:#x} suits no {self.dtype}")
        for what, stride in (("items", self.item_stride), *((f"axis {axis.name}", axis.stride) for axis in self.axes)):
            _require(
                stride % self.itemsize == 0, f"{where}: the stride of {what}, {stride} bytes, suits no {self.dtype}"
            )

    def _check_axes(self, where: str) -> None:
        _within(len(self.axes), 1, limits.MAX_AXES, f"{where}: number of axes")
        names = [axis.name for axis in self.axes]
        item, cut, known = _SHAPES[self.role]
        _require(self.item is item, f"{where}: a request is given it by {item}, not by {self.item}")
        _require(
            frozenset(names) == known and len(names) == len(known),
            f"{where}: its axes are {', '.join(names)}, must be {', '.join(sorted(known))}",
        )
        _require(
            [axis.name for axis in self.axes if axis.segments] == [cut],
            f"{where}: axis {cut}, and no other, must have segments",
        )
        if self.item is Item.PAGE:
            _require(
                self.encoding != PLAIN or self._is_outermost(AxisName.TOKEN),
                f"{where}: tokens must be the outermost axis of a page in memory, so that a part of it can be moved",
            )
        dense = self.itemsize
        for axis in self.axes:
            dense *= axis.size
        _require(
            self.encoding == PLAIN or dense == self.item_span,
            f"{where}: items in encoding {self.encoding} must have no gaps, {dense} bytes lie over {self.item_span}",
        )
        inner, span = "an element", self.itemsize
        for axis in reversed(self.memory_order):
            _require(
                axis.size == 1 or axis.stride >= span,
                f"{where}: axis {axis.name} has a stride of {axis.stride} bytes, but {inner} takes {span}",
            )
            inner, span = f"what lies inside axis {axis.name}", span + (axis.size - 1) * axis.stride
        _require(
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
        _require(
            axis.size == expected,
            f"{self.role}: axis {axis.name} has {axis.size} elements, but its segments give rank {rank} of TP {tp} "
            f"{expected}: {', '.join(describe_segments(axis.segments))}",
        )


def describe_segments(segments: tuple[Segment, ...]) -> Iterator[str]:
    """Each segment in words, for messages."""
    for segment in segments:
        yield f"{segment.name} {segment.heads} x {segment.width} {segment.sharding.replace('_', ' ')}"
