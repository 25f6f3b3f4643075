"""How a unit of staging is divided among the sources, and how large it must be. Decode's decision, once per plan."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_hetero.errors import StagingError, TopologyError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Component, Item, Role
from sglang_hetero.layout.manifest import Coordinates, Manifest
from sglang_hetero.reshard.plan import Plan

from .piece import SourceSide, aligned, sides_of

UNIT_OPTION = "SGLANG_HETERO_UNIT_KB"
"""Sets the size of a unit; read by backend/options.py."""
UNIT_ALIGN = 4096
"""Bytes. Units are whole memory pages, so that no page is written for two requests, and every unit of an aligned arena
begins aligned."""
UNIT_TARGET = 2 << 20
"""Bytes that a unit has at least, so that pages are moved in batches: 16 pages of 128 tokens of Qwen3.5-2B's keys. A
piece costs a message, an acknowledgement and a merge whatever its size, in the order of a tenth of a millisecond
(estimated, not measured); 2 MiB take that long on a link of 20 GB/s."""
LARGEST_PREFILL_TP = 16
"""A decode rank's default unit is enough for this many prefill TP ranks, and all below. It is chosen before any of them
is known, and with more ranks each may need an area of its own for the same replicated heads."""
KIB = 1 << 10


@dataclass(frozen=True)
class Window:
    """The units of a request per stage, and how each of them is divided.

    areas: per source number (offset in the unit, bytes); (0, 0) without any share. Those of one stage are disjoint; a
    unit belongs to one stage, so those of two stages may be the same. pages_per_piece: of every paged role in the plan.
    """

    units: int
    unit_bytes: int
    areas: tuple[tuple[int, int], ...]
    pages_per_piece: Mapping[Role, int]


def window_for(plan: Plan, unit_bytes: int, units: int) -> Window:
    """Divide units of `unit_bytes` among the sources of a plan so that pieces are as large as possible.

    Every source gets what it needs at most in one piece. Pieces of all paged roles are given about the same number of
    bytes, as large as the fullest stage allows. Raises StagingError if not even one page of each role fits.
    """
    if units < 1:
        raise StagingError(f"a window has {units} units, must be 1 or more")
    sides = sides_of(plan)
    pages = _page_bytes(plan)
    stages: dict[int, list[SourceSide]] = {}
    for side in sides:
        stages.setdefault(plan.sources[side.source].coordinates.pp_rank, []).append(side)

    def division(piece_bytes: int) -> dict[Role, int]:
        return {role: max(1, piece_bytes // nbytes) for role, nbytes in pages.items()}

    def fits(piece_bytes: int) -> bool:
        per_piece = division(piece_bytes)
        return all(_total(stage, per_piece) <= unit_bytes for stage in stages.values())

    if not fits(0):
        raise StagingError(_too_small(plan, stages, division(0), unit_bytes))
    low, high = 0, unit_bytes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    per_piece = division(low)
    areas: list[tuple[int, int]] = [(0, 0)] * len(sides)
    for stage in stages.values():
        offset = 0
        for side in stage:
            nbytes = side.area_bytes(per_piece)
            areas[side.source] = (offset, nbytes) if nbytes else (0, 0)
            offset += nbytes
    return Window(units, unit_bytes, tuple(areas), per_piece)


def unit_bytes_for(manifest: Manifest) -> int:
    """The default size of a decode rank's units: enough for every prefill TP size up to LARGEST_PREFILL_TP.

    The unit must hold one page of every role and the linear state of one layer, each source in its own area. Which of
    the ranks that hold the same heads sends them changes from layer to layer, so each of them gets room for them all:
    with P ranks and H heads that is max(1, P / H) times the piece, P times where all is replicated, and of a draft's
    heads what `_least` says. Pipeline stages make nothing larger: each holds some of the layers, and its sources have a
    unit to themselves.
    """
    least = max(_least(manifest, tp) for tp in range(1, LARGEST_PREFILL_TP + 1) if _legal(manifest, tp))
    return aligned(max(least, UNIT_TARGET), UNIT_ALIGN)


def _page_bytes(plan: Plan) -> dict[Role, int]:
    """Bytes of one page at the destination, of the largest layer of each paged role that the plan moves."""
    found: dict[Role, int] = {}
    for share in plan.shares:
        if share.item is Item.PAGE:
            component = share.destination_component
            nbytes = component.cut_axis.size * _bytes_per_cut_element(component)
            found[share.role] = max(found.get(share.role, 0), nbytes)
    return found


def _bytes_per_cut_element(component: Component) -> int:
    """Live bytes of an item for each element of the axis that is cut over ranks."""
    sizes = [axis.live_rows[1] for axis in component.axes if not axis.segments]
    return component.itemsize * math.prod(sizes)


def _total(stage: Sequence[SourceSide], pages_per_piece: Mapping[Role, int]) -> int:
    return sum(side.area_bytes(pages_per_piece) for side in stage)


def _legal(manifest: Manifest, tp: int) -> bool:
    try:
        for component in manifest.components:
            for segment in component.cut_axis.segments:
                segment.check_tp(tp, component.role)
    except TopologyError:
        return False
    return True


def _least(manifest: Manifest, tp: int) -> int:
    """Bytes of a unit that holds what `tp` ranks of prefill may have to send at a time.

    Of a draft's heads each rank may have all (and then any one sends a page of them) or its share, whatever decode has.
    There are few such pages: one for each role and layer. Nothing takes more room than if each came whole from a rank
    of its own, from those that need least for all the rest.
    """
    drafts = [part for part in manifest.components if part.role.draft and part.cut_axis.name is AxisName.HEAD]
    page = max((part.cut_axis.size * aligned(_bytes_per_cut_element(part)) for part in drafts), default=0)
    entries = sum(len(part.layers) for part in drafts)
    others = sorted(_rest(manifest, tp))
    return sum(max(nbytes, page) for nbytes in others[:entries]) + sum(others[entries:])


def _rest(manifest: Manifest, tp: int) -> Iterator[int]:
    """Bytes of each of `tp` ranks' areas for all but a draft's heads."""
    for rank in range(tp):
        pages, conv, ssm = 0, 0, 0
        for component in manifest.components:
            if component.role.draft and component.cut_axis.name is AxisName.HEAD:
                continue
            nbytes = _common_bytes(component, manifest.coordinates, tp, rank)
            if component.item is Item.PAGE:
                pages = max(pages, nbytes)
            elif component.role is Role.CONV:
                conv = max(conv, nbytes)
            else:
                ssm = max(ssm, nbytes)
        yield aligned(max(pages, aligned(conv) + ssm))


def _common_bytes(component: Component, place: Coordinates, tp: int, rank: int) -> int:
    """Bytes of one item of a decode rank's component that rank `rank` of `tp` holds as well."""
    elements = sum(
        _overlap(segment.local_heads(place.tp_size, place.tp_rank), segment.local_heads(tp, rank)) * segment.width
        for segment in component.cut_axis.segments
    )
    return elements * _bytes_per_cut_element(component)


def _overlap(left: range, right: range) -> int:
    return max(0, min(left.stop, right.stop) - max(left.start, right.start))


def _too_small(
    plan: Plan, stages: Mapping[int, Sequence[SourceSide]], one_page: Mapping[Role, int], unit_bytes: int
) -> str:
    number, stage = max(stages.items(), key=lambda item: _total(item[1], one_page))
    need, largest = _total(stage, one_page), max(_needs(stage))
    tp = plan.sources[0].coordinates.tp_size
    return (
        f"{plan.destination.label}: a unit of staging has {unit_bytes} bytes, but with {tp} TP ranks of prefill "
        f"(stage {number}, {plan.sources[0].host}) one needs {need}, and most of it for {largest[1]}; set "
        f"{UNIT_OPTION}={-(-need // KIB)} or more on decode"
    )


def _needs(stage: Sequence[SourceSide]) -> Iterator[tuple[int, str]]:
    """What the sources of a stage need together, of linear state and of a page of each role."""
    yield sum(side.state_bytes for side in stage), f"the linear state ({Role.CONV} and {Role.SSM}) of one layer"
    for role in dict.fromkeys(role for side in stage for role in side.page_bytes):
        yield sum(side.page_bytes.get(role, 0) for side in stage), f"one page of {role}"
