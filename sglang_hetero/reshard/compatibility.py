"""Whether two sides mean the same: every rule that refuses a pair before a byte moves, each once.

Strides, the number of items and the order of axes in memory may differ, that is what the copies are for. What an
element is may not.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sglang_hetero.errors import LayoutMismatch, TopologyError
from sglang_hetero.layout.axes import Segment, Sharding, describe_segments
from sglang_hetero.layout.checks import short
from sglang_hetero.layout.component import PLAIN, Component, Role
from sglang_hetero.layout.manifest import Manifest, Side

SHOWN_RANKS = 4


@dataclass(frozen=True)
class Policy:
    """What to do about a component that only one side has. Everything not named here is refused.

    Only draft roles may be named: without its state a model gives wrong text, without draft KV it only guesses worse.
    Raises ValueError for another role.
    """

    drop: frozenset[Role] = field(default_factory=frozenset)
    """Prefill has it, decode does not: it is not sent."""
    start_empty: frozenset[Role] = field(default_factory=frozenset)
    """Decode has it, prefill does not: decode begins with what its own steps write."""

    def __post_init__(self) -> None:
        vital = sorted(role for role in self.drop | self.start_empty if not role.draft)
        if vital:
            raise ValueError(f"{', '.join(vital)}: only draft roles can be left out")


STRICT = Policy()
"""Both sides must have the same components."""
_DRAFTS = frozenset(role for role in Role if role.draft)
UNEQUAL_DRAFTS = Policy(drop=_DRAFTS, start_empty=_DRAFTS)
"""One side may speculate where the other does not: what a transfer, the router and `explain` plan with."""


def check_sources(sources: Sequence[Manifest], destination: Manifest) -> None:
    """Raise TopologyError or LayoutMismatch unless `sources` are all ranks of one prefill replica for `destination`."""
    if not sources:
        raise TopologyError(f"{destination.label} has no prefill rank to receive from; give one manifest per rank")
    for manifest, side in [*((source, Side.PREFILL) for source in sources), (destination, Side.DECODE)]:
        if manifest.side is not side:
            raise TopologyError(
                f"{manifest.label} stands where a {side} rank is needed; a hand-over goes prefill to decode"
            )
    if destination.coordinates.pp_size > 1:
        raise TopologyError(
            f"{destination.label} is one of several pipeline stages; start decode without --pp-size, only prefill may "
            "have stages"
        )
    first = sources[0]
    for source in sources:
        _check_peer(first, source)
    _check_complete(sources)
    if first.sglang != destination.sglang:
        raise LayoutMismatch(
            f"{first.label} runs SGLang {first.sglang}, {destination.label} {destination.sglang}: no pair of two "
            "releases has been run; install the same SGLang on both, or leave the pair to SGLang's own path with "
            "SGLANG_HETERO=off on both (docs/versions.md)"
        )
    if first.page_size != destination.page_size:
        raise LayoutMismatch(
            f"{first.label} has pages of {first.page_size} tokens, {destination.label} of {destination.page_size}: "
            "pages of one size cannot become pages of another; start both with the same --page-size"
        )
    if first.model != destination.model:
        raise LayoutMismatch(
            f"{first.label} serves model {first.model}, {destination.label} {destination.model}: their caches have "
            "nothing to do with each other; start both with the same checkpoint"
        )


def _check_peer(first: Manifest, source: Manifest) -> None:
    """Raise unless two ranks can be of one prefill replica."""
    for name in ("tp_size", "pp_size", "dp_size", "dp_rank"):
        mine, other = getattr(first.coordinates, name), getattr(source.coordinates, name)
        if mine != other:
            raise TopologyError(
                f"{first.label} has {name} {mine}, {source.label} {other}: ranks of two replicas cannot hand over one "
                "request; give the ranks of one prefill replica"
            )
    for name in ("page_size", "model", "sglang"):
        mine, other = getattr(first, name), getattr(source, name)
        if mine != other:
            raise LayoutMismatch(f"{first.label} has {name} {mine}, {source.label} {other}: restart the prefill server")
    if first.row != source.row:
        raise LayoutMismatch(
            f"{first.label} and {source.label} have different rows of metadata: restart the prefill server, all hosts "
            "with the same flags"
        )


def _check_complete(sources: Sequence[Manifest]) -> None:
    """Raise TopologyError unless every TP rank of every pipeline stage is there once."""
    first = sources[0].coordinates
    places = Counter((source.coordinates.pp_rank, source.coordinates.tp_rank) for source in sources)
    (stage, rank), count = places.most_common(1)[0]
    if count > 1:
        raise TopologyError(
            f"{count} manifests of prefill stage {stage}, TP rank {rank} ({sources[0].host}): a rank that was "
            "restarted has a new incarnation; drop the old manifest"
        )
    ranks = first.pp_size * first.tp_size
    if len(places) < ranks:
        # One by one and only as many as are shown: the sizes are what a peer says.
        wanted = ((pp, tp) for pp in range(first.pp_size) for tp in range(first.tp_size))
        missing = islice((place for place in wanted if place not in places), SHOWN_RANKS)
        listed = ", ".join(f"stage {pp} TP rank {tp}" for pp, tp in missing)
        raise TopologyError(
            f"the prefill server at {sources[0].host} has {ranks} ranks, {ranks - len(places)} manifests are missing: "
            f"{listed}{', ...' if ranks - len(places) > SHOWN_RANKS else ''}; wait until all of them are registered"
        )


def check_roles(sources: Sequence[Manifest], destination: Manifest, policy: Policy) -> frozenset[Role]:
    """The roles that move. Raises LayoutMismatch for one that only one side has and no policy covers."""
    offered, wanted = roles_of(sources), destination.roles
    if (offered & _DRAFTS) and (wanted & _DRAFTS) and (offered ^ wanted) & _DRAFTS:
        raise LayoutMismatch(
            f"{sources[0].label} keeps its draft in {_listed(offered & _DRAFTS)}, {destination.label} in "
            f"{_listed(wanted & _DRAFTS)}: these are caches of two different draft models; start both with the same "
            "speculative decoding, or one of them without"
        )
    for roles, allowed, has, lacks in (
        (offered - wanted, policy.drop, sources[0].label, destination.label),
        (wanted - offered, policy.start_empty, destination.label, sources[0].label),
    ):
        for role in sorted(roles - allowed):
            remedy = (
                "start both with the same speculative decoding, or allow it by policy"
                if role.draft
                else "start both with the same checkpoint and the same attention backend"
            )
            raise LayoutMismatch(f"{has} has {role}, {lacks} has none: {remedy}")
    return offered & wanted


def roles_of(sources: Sequence[Manifest]) -> frozenset[Role]:
    """Roles that a prefill replica holds, on any of its ranks."""
    return frozenset().union(*(source.roles for source in sources))


def _listed(roles: frozenset[Role]) -> str:
    return ", ".join(sorted(roles))


def check_components(held: Sequence[tuple[Manifest, Component]], destination: Manifest, ours: Component) -> None:
    """Raise LayoutMismatch unless the ranks of a stage hold what `ours` is for, all of them cut in one way."""
    for source, theirs in held:
        _check_component(source, theirs, destination, ours)
    first, mine = held[0]
    for source, theirs in held[1:]:
        left, right = mine.cut_axis, theirs.cut_axis
        if left.segments != right.segments:
            raise LayoutMismatch(
                f"{ours.role}: {first.label} has axis {left.name} with segments {_in_words(left.segments)}, "
                f"{source.label} {_in_words(right.segments)}: the ranks of a server keep a cache in one way, so that "
                f"{destination.label} cannot know who has what; restart the prefill server, all hosts with the same "
                "flags"
            )


def _check_component(source: Manifest, theirs: Component, destination: Manifest, ours: Component) -> None:
    """Raise LayoutMismatch unless an element means the same in both components of one role."""
    for what, remedy, left, right in _meanings(theirs, ours):
        if left != right:
            raise LayoutMismatch(
                f"{ours.role}: {source.label} has {what} {_in_words(left)}, {destination.label} {_in_words(right)}; "
                f"{remedy}"
            )
    if PLAIN not in (theirs.encoding, ours.encoding):
        _check_opaque(source, theirs, destination, ours)


def check_layers(sources: Sequence[Manifest], destination: Manifest, role: Role) -> None:
    """Raise LayoutMismatch if prefill has layers of a role that decode does not have.

    Those that only decode has have no writer, which the plan's proof finds.
    """
    ours = {layer for component in destination.of(role) for layer in component.layers}
    theirs = {layer for source in sources for component in source.of(role) for layer in component.layers}
    if theirs - ours:
        raise LayoutMismatch(
            f"{role}: {sources[0].label} and its peers have layers {short(sorted(theirs - ours))}, {destination.label} "
            f"does not; {_SAME_MODEL}"
        )


_SAME_VERSION = "run the same SGLang and sglang-hetero on both sides"
_SAME_MODEL = "start both with the same checkpoint"
_SAME_CUT = (
    "only a draft's heads may be whole on every rank of one side and sharded on the other; start both with the same "
    "parallel settings"
)


_Value = str | int | tuple[Segment, ...]


def _in_words(value: _Value) -> str:
    return (", ".join(describe_segments(value)) or "none") if isinstance(value, tuple) else str(value)


def _meanings(theirs: Component, ours: Component) -> Iterable[tuple[str, str, _Value, _Value]]:
    """What has to be equal: name, remedy, value on the source, value on the destination."""
    remedy = "start both with the same cache dtypes (--kv-cache-dtype, --mamba-ssm-dtype, SGLANG_MAMBA_CONV_DTYPE)"
    yield "dtype", remedy, theirs.dtype, ours.dtype
    yield "encoding", "run both on the same kind of device and attention backend", theirs.encoding, ours.encoding
    # Sizes may well be equal where the order is not: a state of 4 x 4 read the wrong way round is plausible nonsense.
    yield "axes", _SAME_VERSION, ", ".join(a.name for a in theirs.axes), ", ".join(a.name for a in ours.axes)
    for left, right in zip(theirs.axes, ours.axes, strict=True):
        alike = _content(left.segments) == _content(right.segments)
        if not (alike and ours.role.draft):
            cut_remedy = _SAME_CUT if alike else _SAME_MODEL
            yield f"axis {left.name} with segments", cut_remedy, left.segments, right.segments
        if not left.segments and not right.segments:
            yield f"live size of axis {left.name}", _SAME_MODEL, left.live_rows[1], right.live_rows[1]


def _content(segments: tuple[Segment, ...]) -> tuple[tuple[str, int, int, bool], ...]:
    """What all ranks together hold along the axis, be it that each has all heads or its share of them."""
    return tuple((one.name, one.heads, one.width, one.sharding is Sharding.DIVIDED) for one in segments)


def _check_opaque(source: Manifest, theirs: Component, destination: Manifest, ours: Component) -> None:
    """Items whose bytes only a kernel understands are copied whole or not at all; see coverage.py for the blocks."""
    shapes = [[(axis.size, axis.stride, axis.live_rows) for axis in component.axes] for component in (theirs, ours)]
    if shapes[0] != shapes[1]:
        raise LayoutMismatch(
            f"{ours.role}: {source.label} and {destination.label} keep it in encoding {ours.encoding}, whose items can "
            "only be moved whole, but theirs differ; use the same TP size on both sides, or the plain cache layout"
        )
