"""Plan: which elements go from which prefill rank to a decode rank. Once per destination, pure.

Both sides plan with this function from the same manifests and compare `Plan.fingerprint`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hetero.errors import CoverageError
from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.component import Component, Role
from sglang_hetero.layout.manifest import Coordinates, Manifest, digest
from sglang_hetero.layout.sharding import replica_count, shard_count, shard_interval

from .compatibility import (
    UNEQUAL_DRAFTS,
    Policy,
    check_components,
    check_layers,
    check_roles,
    check_sources,
    roles_of,
)
from .coverage import prove
from .row import RowPlan, plan_row
from .share import Block, Share


@dataclass(frozen=True)
class Plan:
    """Who sends what to one decode rank.

    sources: prefill ranks in the order of the manifests that were given, ordered by (pp_rank, tp_rank).
    shares: every contribution. missing: roles that the destination has and nobody sends, by policy: it begins them
    empty. row: what it takes over of the metadata that goes with a first token.
    """

    sources: tuple[Manifest, ...]
    destination: Manifest
    shares: tuple[Share, ...]
    missing: frozenset[Role]
    row: RowPlan

    @property
    def fingerprint(self) -> str:
        """Digest of every copy, in elements and bytes; addresses and numbers of items are left out."""
        return digest([_identity(share) for share in self.shares])

    def fingerprint_of(self, source: int) -> str:
        """Digest of what one source sends, which is all that this source and the destination must agree on."""
        return digest([_identity(share) for share in self.of(source)])

    @property
    def unequal_drafts(self) -> str:
        """What comes of it that only one side speculates, as a sentence; empty where both do, or neither."""
        prefill, decode = self.sources[0].label, self.destination.label
        if self.missing:
            return (
                f"{prefill} has no draft model, {decode} has: requests begin there without draft caches of the prompt, "
                "so that fewer drafts are accepted; the tokens are the same. Start prefill with the same speculative "
                "decoding to have them"
            )
        if any(role.draft for role in roles_of(self.sources) - self.destination.roles):
            return (
                f"{prefill} has a draft model, {decode} has none: its draft caches are not sent. Start prefill without "
                "speculative decoding to save their memory and the time they take"
            )
        return ""

    def of(self, source: int) -> tuple[Share, ...]:
        """The shares of source number `source`; none if the destination needs nothing of it."""
        return tuple(share for share in self.shares if share.source == source)


def plan(sources: Sequence[Manifest], destination: Manifest, policy: Policy = UNEQUAL_DRAFTS) -> Plan:
    """The copies that bring every element of `destination` exactly once from exactly one of `sources`.

    sources: the manifests of all ranks (TP ranks of all pipeline stages) of one prefill replica, in any order.
    Raises TopologyError for ranks that do not belong together, LayoutMismatch where the two sides do not mean the same,
    CoverageError where an element would get no writer or two.
    """
    sources = tuple(sources)
    check_sources(sources, destination)
    ordered = tuple(sorted(sources, key=lambda source: (source.coordinates.pp_rank, source.coordinates.tp_rank)))
    moving = check_roles(ordered, destination, policy)
    for role in sorted(moving):
        check_layers(ordered, destination, role)
    shares: list[Share] = []
    turn = 0
    holders = {role: _holders_of_layers(ordered, role) for role in moving}
    for component in destination.components:
        if component.role in moving:
            shares += _shares(ordered, destination, component, holders[component.role], turn)
            turn += len(component.layers)
    shares.sort(key=lambda share: share.source)  # stable: within a source in the order of the destination's manifest
    missing = destination.roles - moving
    prove(ordered, destination, shares, missing)
    unequal = any(role.draft for role in roles_of(ordered) ^ destination.roles)
    row = plan_row(ordered[0], destination, drafts_move=not unequal)
    return Plan(ordered, destination, tuple(shares), missing, row)


def _shares(
    sources: tuple[Manifest, ...],
    destination: Manifest,
    ours: Component,
    holders: dict[int, dict[int, int]],
    first_turn: int,
) -> list[Share]:
    """The shares that make up one component of the destination; its layers take turns from `first_turn` on.

    Who holds what is read off the sources' own segments: a draft may be whole on every rank of one side.
    """
    cuts: dict[tuple[tuple[int, int], ...], tuple[tuple[Segment, ...], int]] = {}
    layers_of: dict[tuple[int, int, tuple[Block, ...]], list[int]] = {}
    # Layers of one stage and one turn are cut in the same way: in a deep model nearly all are found here.
    known: dict[tuple[int, tuple[tuple[int, int], ...]], dict[int, tuple[Block, ...]]] = {}
    for turn, layer in enumerate(ours.layers, first_turn):
        stage = _stage(sources, destination, ours.role, layer, holders.get(layer, {}))
        held = tuple(stage.items())
        if held not in cuts:
            theirs = [(sources[number], sources[number].components[position]) for number, position in held]
            check_components(theirs, destination, ours)
            segments = theirs[0][1].cut_axis.segments
            cuts[held] = segments, _period(segments, sources[0].coordinates.tp_size)
        cut, period = cuts[held]
        key = (turn % period, held)
        if key not in known:
            known[key] = _blocks(ours, tuple(stage), sources, destination, cut=cut, turn=turn)
        for number, blocks in known[key].items():
            layers_of.setdefault((number, stage[number], blocks), []).append(layer)
    return [
        Share(number, ours.role, tuple(layers), blocks, sources[number].components[position], ours)
        for (number, position, blocks), layers in layers_of.items()
    ]


def _holders_of_layers(sources: tuple[Manifest, ...], role: Role) -> dict[int, dict[int, int]]:
    """Per layer, per number of a source that holds it, the position of the component in that source's manifest."""
    holders: dict[int, dict[int, int]] = {}
    for number, source in enumerate(sources):
        for position, component in enumerate(source.components):
            if component.role is role:
                for layer in component.layers:
                    holders.setdefault(layer, {})[number] = position
    return holders


def _stage(
    sources: tuple[Manifest, ...], destination: Manifest, role: Role, layer: int, holders: dict[int, int]
) -> dict[int, int]:
    """`holders`, if they are all TP ranks of exactly one pipeline stage. Raises CoverageError otherwise."""
    places = [sources[number].coordinates for number in holders]
    ranks = sorted(place.tp_rank for place in places)
    stages = sorted({place.pp_rank for place in places})
    if ranks == list(range(sources[0].coordinates.tp_size)) and len(stages) == 1:
        return holders
    found = f"by TP ranks {ranks} of stages {stages}" if holders else "by no rank"
    raise CoverageError(
        f"layer {layer} of {role} is held {found} of prefill at {sources[0].host}, but {destination.label} needs it "
        "from all TP ranks of one stage; start both sides with the same checkpoint, and all hosts of prefill with the "
        "same flags"
    )


def _period(cut: tuple[Segment, ...], source_tp: int) -> int:
    """Turns after which every segment's replicas begin again."""
    return math.lcm(*(len(ranks) for segment in cut for _, ranks in _holders(segment, source_tp)))


def _blocks(
    ours: Component,
    stage: tuple[int, ...],
    sources: tuple[Manifest, ...],
    destination: Manifest,
    *,
    cut: tuple[Segment, ...],
    turn: int,
) -> dict[int, tuple[Block, ...]]:
    """Per source number the runs of cut-axis elements that it is elected to send of one layer, which `stage` holds.

    cut: the segments as the sources have them.
    """
    place = destination.coordinates
    theirs_tp = sources[0].coordinates.tp_size
    number_of_rank = {sources[number].coordinates.tp_rank: number for number in stage}
    found: dict[int, list[Block]] = {number: [] for number in stage}
    destination_start = 0
    starts = dict.fromkeys(stage, 0)
    for segment, theirs in zip(ours.cut_axis.segments, cut, strict=True):
        wanted = segment.local_heads(place.tp_size, place.tp_rank)
        for held, ranks in _holders(theirs, theirs_tp):
            first, last = max(held.start, wanted.start), min(held.stop, wanted.stop)
            if first >= last:
                continue
            writer = number_of_rank[_elected(ranks, place, theirs_tp, turn)]
            found[writer].append(
                Block(
                    source=starts[writer] + (first - held.start) * segment.width,
                    destination=destination_start + (first - wanted.start) * segment.width,
                    size=(last - first) * segment.width,
                )
            )
        destination_start += len(wanted) * segment.width
        for number in stage:
            rank = sources[number].coordinates.tp_rank
            starts[number] += theirs.local_size(theirs_tp, rank)
    return {number: _joined(blocks) for number, blocks in found.items() if blocks}


def _elected(ranks: range, place: Coordinates, source_tp: int, turn: int) -> int:
    """Which of the ranks that hold the same heads sends them to the rank at `place`.

    With equal TP sizes its counterpart, which has all that it needs. Otherwise they take turns: by layer and component,
    so that their links share the load, and by destination rank, so that several do not all ask the same one.
    """
    if source_tp == place.tp_size and place.tp_rank in ranks:
        return place.tp_rank
    return ranks[(turn + place.tp_rank) % len(ranks)]


def _holders(segment: Segment, tp: int) -> list[tuple[range, range]]:
    """The distinct runs of global heads of a segment, each with the ranks that hold it."""
    if segment.sharding is Sharding.REPLICATED:
        return [(range(segment.heads), range(tp))]
    replicas = replica_count(segment.heads, tp)
    return [
        (shard_interval(segment.heads, tp, shard), range(shard * replicas, (shard + 1) * replicas))
        for shard in range(shard_count(segment.heads, tp))
    ]


def _joined(blocks: list[Block]) -> tuple[Block, ...]:
    """Blocks in source order; those that follow each other in both ranks become one."""
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.source):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source + last.size == block.source
            and last.destination + last.size == block.destination
        ):
            joined[-1] = Block(last.source, last.destination, last.size + block.size)
        else:
            joined.append(block)
    return tuple(joined)


def _identity(share: Share) -> object:
    """What two sides have to agree on about a share."""
    component = share.source_component
    return (
        share.source,
        share.role,
        component.dtype,
        component.encoding,
        share.layers,
        share.blocks,
        share.staged_axes,
    )
