"""Explain: who sends what to whom, in bytes and descriptors, as plain data for a table or JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.layout.row import Column

from .bind import Pages, Piece, bind
from .plan import Plan
from .upstream import Upstream, upstream


@dataclass(frozen=True)
class Part:
    """One share of one source. blocks are (source, destination, size) in elements along the cut axis.

    packed: gathered into a buffer at the source before it is sent.
    """

    role: str
    layers: tuple[int, ...]
    axis: str
    blocks: tuple[tuple[int, int, int], ...]
    packed: bool
    descriptors: int
    bytes: int


@dataclass(frozen=True)
class Route:
    """What one source sends to one decode rank.

    staged: it goes to staging and is merged; where both ranks have byte-compatible layouts there is nothing to merge,
    and SGLang's own path writes item to item.
    """

    decode_rank: int
    staged: bool
    kv_descriptors: int
    state_descriptors: int
    bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Source:
    """What one prefill rank sends of a request, to all decode ranks together."""

    rank: int
    stage: int
    label: str
    kv_descriptors: int
    state_descriptors: int
    bytes: int
    packed: bool
    to: tuple[Route, ...]


@dataclass(frozen=True)
class Request:
    """A request to explain a plan with: ids of its pages at every source, its slot there, its tokens and chunks."""

    pages: Pages
    slot: int
    tokens: int
    chunks: Sequence[range]


@dataclass(frozen=True)
class RowColumn:
    """One column of the row with the first token: bytes and dtype on each side, 0 and "" where a side has none.

    taken: decode takes it over; what it does not take over of its own it begins itself.
    """

    name: str
    prefill_bytes: int
    prefill_dtype: str
    decode_bytes: int
    decode_dtype: str
    taken: bool

    @property
    def differs(self) -> bool:
        """Whether the sides have it differently, or decode does not take it over."""
        alike = (self.prefill_bytes, self.prefill_dtype) == (self.decode_bytes, self.decode_dtype)
        return not (alike and self.taken)


@dataclass(frozen=True)
class SlotRows:
    """Rows of a conv slot's window on each side, of which the last `live` travel."""

    prefill: int
    decode: int
    live: int


@dataclass(frozen=True)
class Explanation:
    """The hand-over of one request; fingerprints are those of each decode rank's plan.

    upstream: what one stock sender would do for the first decode rank. unequal_drafts: what comes of it that only one
    side speculates, empty if none. row: columns of the row with the first token, empty if they are not known.
    slot_rows: None without linear layers.
    """

    tokens: int
    pages: int
    chunks: int
    fingerprints: tuple[str, ...]
    sources: tuple[Source, ...]
    upstream: Upstream
    unequal_drafts: str
    row: tuple[RowColumn, ...]
    slot_rows: SlotRows | None

    def as_json(self) -> dict[str, Any]:
        """Nothing but dictionaries, lists, strings and numbers."""
        return asdict(self)


def explain(plans: Sequence[Plan], request: Request) -> Explanation:
    """Explain a hand-over to the ranks of one decode server; the plans share their sources."""
    sources = []
    for number, manifest in enumerate(plans[0].sources):
        routes = tuple(route for plan in plans if (route := _route(plan, number, request)).parts)
        sources.append(
            Source(
                rank=manifest.coordinates.tp_rank,
                stage=manifest.coordinates.pp_rank,
                label=manifest.label,
                kv_descriptors=sum(route.kv_descriptors for route in routes),
                state_descriptors=sum(route.state_descriptors for route in routes),
                bytes=sum(route.bytes for route in routes),
                packed=any(part.packed for route in routes for part in route.parts),
                to=routes,
            )
        )
    return Explanation(
        tokens=request.tokens,
        pages=len(request.pages),
        chunks=len(request.chunks),
        fingerprints=tuple(plan.fingerprint for plan in plans),
        sources=tuple(sources),
        upstream=upstream(plans[0], request.pages, list(request.chunks)),
        unequal_drafts=plans[0].unequal_drafts,
        row=_row(plans[0]),
        slot_rows=_slot_rows(plans[0]),
    )


def _row(plan: Plan) -> tuple[RowColumn, ...]:
    """Decode's columns in its order, then those that only prefill has."""
    theirs, ours = plan.sources[0].row, plan.destination.row
    by_name = {column.name: column for column in theirs}
    mine = {column.name for column in ours}
    pairs: list[tuple[Column | None, Column | None, bool]] = [
        (by_name.get(column.name), column, taken is not None)
        for column, taken in zip(ours, plan.row.taken, strict=True)
    ]
    pairs += [(column, None, False) for column in theirs if column.name not in mine]
    found = []
    for left, right, taken in pairs:
        there, here = ((one.nbytes, one.dtype) if one else (0, "") for one in (left, right))
        found.append(RowColumn((right or left).name, *there, *here, taken=taken))  # type: ignore[union-attr]
    return tuple(found)


def _slot_rows(plan: Plan) -> SlotRows | None:
    ours = plan.destination.of(Role.CONV)
    theirs = [component for source in plan.sources for component in source.of(Role.CONV)]
    if not (ours and theirs):
        return None
    left, right = (component.axis(AxisName.WINDOW) for component in (theirs[0], ours[0]))
    return SlotRows(left.size, right.size, right.live_rows[1])


def _route(plan: Plan, source: int, request: Request) -> Route:
    binding = bind(plan, source, pages=request.pages, slot=request.slot, tokens=request.tokens, chunks=request.chunks)
    parts: dict[int, list[Piece]] = {}
    for piece in binding.pieces:
        parts.setdefault(id(piece.share), []).append(piece)
    return Route(
        decode_rank=plan.destination.coordinates.tp_rank,
        staged=plan.sources[source].fingerprint != plan.destination.fingerprint,
        kv_descriptors=sum(len(piece.descriptors) for piece in binding.of(Item.PAGE)),
        state_descriptors=sum(len(piece.descriptors) for piece in binding.of(Item.SLOT)),
        bytes=sum(piece.descriptors.nbytes for piece in binding.pieces),
        parts=tuple(_part(pieces) for pieces in parts.values()),
    )


def _part(pieces: list[Piece]) -> Part:
    share = pieces[0].share
    return Part(
        role=str(share.role),
        layers=share.layers,
        axis=str(share.source_component.cut_axis.name),
        blocks=tuple((block.source, block.destination, block.size) for block in share.blocks),
        packed=share.packed,
        descriptors=sum(len(piece.descriptors) for piece in pieces),
        bytes=sum(piece.descriptors.nbytes for piece in pieces),
    )
