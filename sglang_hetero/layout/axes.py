"""The axes of an item: their names, how one of them is cut over tensor-parallel ranks, and where elements lie."""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from . import limits
from .checks import Struct, check_name, require, within
from .sharding import check_divided, check_shardable, head_interval


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
        within(self.heads, 1, limits.MAX_ELEMENTS, f"segment {self.name}: heads")
        within(self.width, 1, limits.MAX_ELEMENTS, f"segment {self.name}: width")

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
        within(self.size, 1, limits.MAX_ELEMENTS, f"axis {self.name}: size")
        within(self.stride, 1, limits.MAX_BYTES, f"axis {self.name}: stride")
        within(len(self.segments), 0, limits.MAX_SEGMENTS, f"axis {self.name}: number of segments")
        if self.live is not None:
            first, count = self.live
            require(
                first >= 0 and count >= 1 and first + count <= self.size,
                f"axis {self.name}: live rows {first} to {first + count - 1} are not within its {self.size}",
            )
            require(not self.segments, f"axis {self.name}: the cut axis has no live rows, all of it is live")

    @property
    def live_rows(self) -> tuple[int, int]:
        """First row and number of rows that hold something."""
        return self.live if self.live is not None else (0, self.size)


def describe_segments(segments: tuple[Segment, ...]) -> Iterator[str]:
    """Each segment in words, for messages."""
    for segment in segments:
        yield f"{segment.name} {segment.heads} x {segment.width} {segment.sharding.replace('_', ' ')}"
