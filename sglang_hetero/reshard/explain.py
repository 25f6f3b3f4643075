"""Explain: who sends what to whom, in bytes and descriptors, as plain data for a table or JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_hetero.layout.component import Item

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
class Explanation:
    """The hand-over of one request; fingerprints are those of each decode rank's plan.

    upstream: what one stock sender would do for the first decode rank.
    """

    tokens: int
    pages: int
    chunks: int
    fingerprints: tuple[str, ...]
    sources: tuple[Source, ...]
    upstream: Upstream

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
    )


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
