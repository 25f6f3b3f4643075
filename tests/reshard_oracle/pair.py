"""A small pair of ranks, and how to change one word of a description."""

from msgspec.structs import replace

from sglang_hetero.layout import AxisName, Coordinates, Role, Side

from . import model as m
from .rank import Rank, Shape

SHAPE = Shape()
ATTENTION_LAYERS, LINEAR_LAYERS = (1, 3), (0, 2)
MODEL = (
    m.heads_kv(Role.TARGET_KEY, 4, 3, ATTENTION_LAYERS),
    m.heads_kv(Role.TARGET_VALUE, 4, 2, ATTENTION_LAYERS),
    m.conv((m.Segment("q", 4, 2), m.Segment("k", 4, 2), m.Segment("v", 8, 2)), 4, LINEAR_LAYERS),
    m.ssm(8, 2, 3, LINEAR_LAYERS),
    m.heads_kv(Role.DRAFT_KEY, 4, 3, (0,)),
    m.heads_kv(Role.DRAFT_VALUE, 4, 2, (0,)),
)


def manifest(side=Side.PREFILL, rank=0, tp=1, model=MODEL, shape=SHAPE, **coordinates):
    """The manifest of one rank of a small GDN model."""
    return Rank(model, side, Coordinates(tp_rank=rank, tp_size=tp, **coordinates), shape).manifest


def prefill(tp=2, **options):
    return [manifest(Side.PREFILL, rank, tp, **options) for rank in range(tp)]


def decode(rank=0, tp=1, **options):
    return manifest(Side.DECODE, rank, tp, **options)


def component(role, **changes):
    """That component of an undivided rank, with these fields changed."""
    return replace(manifest().of(role)[0], **changes)


def with_component(whole, role, **changes):
    """A manifest with fields of one component changed."""
    parts = tuple(replace(part, **changes) if part.role is role else part for part in whole.components)
    return replace(whole, components=parts)


def with_axis(whole, role, name, **changes):
    """A manifest with fields of one axis of one component changed."""
    return with_component(whole, role, axes=changed_axes(whole.of(role)[0], name, **changes))


def changed_axes(part, name, **changes):
    return tuple(replace(axis, **changes) if axis.name is name else axis for axis in part.axes)


def with_segment(whole, role, index, **changes):
    """A manifest with fields of one segment changed; the axis keeps its size."""
    cut = whole.of(role)[0].cut_axis
    segments = tuple(replace(s, **changes) if i == index else s for i, s in enumerate(cut.segments))
    return with_axis(whole, role, AxisName(cut.name), segments=segments)
