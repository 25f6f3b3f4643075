"""The caches of a model, all ranks together: the value of every element, and which elements a TP rank holds.

An element's value is a hash of role, layer, GLOBAL head, position and channel. Ownership is written down here from
SGLang's rules alone, naively: heads go to ranks in contiguous runs; with more ranks than heads, `tp // heads`
neighbours hold the same one; each conv segment is cut on its own; a replicated segment is on every rank.
"""

from dataclasses import dataclass, replace

import numpy as np

from sglang_hetero.layout import AxisName, Item, Role
from tests.harness.oracle import Bits, values

SEGMENT_SPACING = 1 << 20
"""Heads of different segments of one tensor get different numbers in the hash."""
ROLE_BASE = 100
"""Added to a role's number in the hash; below are the harness's own components."""
ROLES = tuple(Role)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}

POSITIONS = (AxisName.TOKEN, AxisName.WINDOW, AxisName.STATE_ROW)
"""Axes that count as `position` in the hash; the others count as `channel`."""


@dataclass(frozen=True)
class Segment:
    """A run of `heads` heads of `width` elements on the cut axis, of the whole model.

    replicated: all of it on every rank. divided: never more ranks than heads, as in SGLang's linear attention.
    """

    name: str
    heads: int
    width: int = 1
    replicated: bool = False
    divided: bool = False


@dataclass(frozen=True)
class Tensor:
    """What one role holds on each of its layers, all ranks together.

    axes: name and size, in the order of the description. The size of the `cut` axis follows from the segments and that
    of the token axis from the page, so both are None here; the window's is that of its live rows.
    """

    role: Role
    dtype: str
    layers: tuple[int, ...]
    cut: AxisName
    segments: tuple[Segment, ...]
    axes: tuple[tuple[AxisName, int | None], ...]

    @property
    def item(self) -> Item:
        return Item.PAGE if any(name is AxisName.TOKEN for name, _ in self.axes) else Item.SLOT

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]


Model = tuple[Tensor, ...]


def held_heads(segment: Segment, tp: int, rank: int) -> list[int]:
    """Global heads of a segment on one rank."""
    if segment.replicated:
        return list(range(segment.heads))
    if tp > segment.heads:
        assert tp % segment.heads == 0 and not segment.divided, "not a legal TP size"
        return [rank // (tp // segment.heads)]
    assert segment.heads % tp == 0, "not a legal TP size"
    local = segment.heads // tp
    return list(range(rank * local, rank * local + local))


def legal(model: Model, tp: int) -> bool:
    """True if SGLang could shard every segment over `tp` ranks."""
    cut = [segment for tensor in model for segment in tensor.segments if not segment.replicated]
    return all(one.heads % tp == 0 or (tp % one.heads == 0 and not one.divided) for one in cut)


def cut_elements(tensor: Tensor, tp: int, rank: int) -> tuple[list[int], list[int]]:
    """Per local element of the cut axis its number of head (unique over segments) and its channel inside the head."""
    heads, channels = [], []
    for index, segment in enumerate(tensor.segments):
        for head in held_heads(segment, tp, rank):
            for channel in range(segment.width):
                heads.append(index * SEGMENT_SPACING + head)
                channels.append(channel)
    return heads, channels


def live_shard(tensor: Tensor, seed: int, layer: int, tokens: int, *, tp: int, rank: int) -> Bits:
    """The live elements of one request on one rank: tokens (or window rows, oldest first) without pages, slots, gaps.

    Shape: `tensor.axes` with `tokens` and the local cut axis put in.
    """
    heads, channels = cut_elements(tensor, tp, rank)
    head = np.zeros(1, dtype=np.int64)
    position = channel = head
    for index, (name, size) in enumerate(tensor.axes):
        shape = [-1 if axis == index else 1 for axis in range(len(tensor.axes))]
        if name is tensor.cut:
            head = np.array(heads).reshape(shape)
            channel = channel + np.array(channels).reshape(shape)
        elif name in POSITIONS:
            position = np.arange(tokens if size is None else size).reshape(shape)
        else:
            channel = channel + np.arange(size).reshape(shape)
    number = ROLE_BASE + ROLES.index(tensor.role)
    return values(seed, number, layer, head=head, position=position, channel=channel, itemsize=tensor.itemsize)


def stage_of(model: Model, stage: int, stages: int) -> Model:
    """The layers of one pipeline stage: equal runs of the model's layers, and the draft on the last stage."""
    count = 1 + max(layer for tensor in model for layer in tensor.layers)
    kept = []
    for tensor in model:
        if tensor.role.draft:
            layers = tensor.layers if stage == stages - 1 else ()
        else:
            layers = tuple(layer for layer in tensor.layers if layer * stages // count == stage)
        if layers:
            kept.append(replace(tensor, layers=layers))
    return tuple(kept)


def without_draft(model: Model) -> Model:
    """The same model without its draft caches."""
    return tuple(tensor for tensor in model if not tensor.role.draft)


def with_whole_draft(model: Model) -> Model:
    """The same model with all of the draft's heads on every rank."""
    return tuple(
        replace(tensor, segments=tuple(replace(segment, replicated=True) for segment in tensor.segments))
        if tensor.role.draft
        else tensor
        for tensor in model
    )


def heads_kv(role: Role, heads: int, width: int, layers: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
    """K or V of ordinary attention: `[token, head, channel]`."""
    axes = ((AxisName.TOKEN, None), (AxisName.HEAD, None), (AxisName.CHANNEL, width))
    return Tensor(role, dtype, layers, AxisName.HEAD, (Segment("kv", heads),), axes)


def latent_kv(role: Role, widths: dict[str, int], layers: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
    """A row of latent attention, the same on every rank: `[token, channel]`."""
    segments = tuple(Segment(name, 1, width, replicated=True) for name, width in widths.items())
    return Tensor(role, dtype, layers, AxisName.CHANNEL, segments, ((AxisName.TOKEN, None), (AxisName.CHANNEL, None)))


def conv(segments: tuple[Segment, ...], kernel: int, layers: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
    """Inputs of a causal convolution: `[channel, window]` with the K-1 rows that the next step reads."""
    axes = ((AxisName.CHANNEL, None), (AxisName.WINDOW, kernel - 1))
    return Tensor(Role.CONV, dtype, layers, AxisName.CHANNEL, segments, axes)


def ssm(
    heads: int, rows: int, columns: int, layers: tuple[int, ...], dtype: str = "float32", *, divided: bool = False
) -> Tensor:
    """A recurrent state: `[head, row, column]`."""
    axes = ((AxisName.HEAD, None), (AxisName.STATE_ROW, rows), (AxisName.STATE_COLUMN, columns))
    return Tensor(Role.SSM, dtype, layers, AxisName.HEAD, (Segment("ssm", heads, divided=divided),), axes)
