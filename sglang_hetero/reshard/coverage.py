"""Proof that a plan brings every destination element exactly once, and that it is the same element of the model.

It looks at the copies and the two descriptions alone, not at how the copies were found: a fault in the planner ends
here and not in a wrong byte.
"""

from collections.abc import Iterator, Sequence

from sglang_hetero.errors import CoverageError
from sglang_hetero.layout.component import PLAIN, Component, Role
from sglang_hetero.layout.limits import MAX_RUNS
from sglang_hetero.layout.manifest import Manifest

from .share import Block, Share

_Stretch = tuple[int, int, int]
"""Segment number, first of its elements in the whole model, and how many."""


def prove(
    sources: Sequence[Manifest], destination: Manifest, shares: Sequence[Share], missing: frozenset[Role]
) -> None:
    """Raise CoverageError naming what is wrong first: elements without a writer or with two, or of another head.

    Along the axes that are not cut every share has all of an item (its live rows, the tokens in use), so that a tiling
    of the cut axis is a tiling of the item.
    """
    writers: dict[tuple[Role, int], list[Share]] = {}
    for share in shares:
        _prove_share(sources[share.source], destination, share)
        for layer in share.layers:
            writers.setdefault((share.role, layer), []).append(share)
    for component in destination.components:
        for layer in component.layers if component.role not in missing else ():
            _prove_tiling(destination, component, layer, writers.pop((component.role, layer), []))
    if writers:
        role, layer = next(iter(writers))
        raise CoverageError(f"{destination.label} has no layer {layer} of {role}, but a source would send it")


def _prove_share(source: Manifest, destination: Manifest, share: Share) -> None:
    """What a share says it reads and writes is there, and each of its blocks is the same elements on both sides."""
    theirs, ours = share.source_component, share.destination_component
    where = f"{share.role}, {source.label} to {destination.label}"
    for component, owner in ((theirs, source), (ours, destination)):
        if component not in owner.components or component.role is not share.role:
            raise CoverageError(f"{where}: the share is of a component that {owner.label} does not have")
        if not set(share.layers) <= set(component.layers):
            raise CoverageError(f"{where}: the share has layers that {owner.label} does not have")
    for block in share.blocks:
        _check_inside(block.source, block.size, theirs, f"{where}: the source would read")
        _check_inside(block.destination, block.size, ours, f"{where}: it would write")
        read = list(_stretches(source, theirs, block.source, block.size))
        written = list(_stretches(destination, ours, block.destination, block.size))
        if read != written:
            raise CoverageError(
                f"{where}: elements {block.source} to {block.source + block.size - 1} of the source are not elements "
                f"{block.destination} to {block.destination + block.size - 1} of the destination in the model"
            )
    whole = (Block(0, 0, theirs.cut_axis.size),)
    if theirs.encoding != PLAIN and share.blocks != whole:
        raise CoverageError(
            f"{where}: items in encoding {theirs.encoding} can only be moved whole, from a rank that has all of them; "
            "use the same TP size on both sides, or the plain cache layout"
        )
    runs = share.run_count * len(share.layers)
    if runs > MAX_RUNS:
        raise CoverageError(
            f"{where}: an item of all layers would be moved in {runs} runs of bytes, at most {MAX_RUNS}"
        )


def _stretches(owner: Manifest, component: Component, first: int, size: int) -> Iterator[_Stretch]:
    """Which elements of the whole model lie at `first` to `first + size - 1` of a rank's cut axis."""
    tp, rank = owner.coordinates.tp_size, owner.coordinates.tp_rank
    start = 0
    for number, segment in enumerate(component.cut_axis.segments):
        heads = segment.local_heads(tp, rank)
        stop = start + len(heads) * segment.width
        begin, end = max(first, start), min(first + size, stop)
        if begin < end:
            yield number, heads.start * segment.width + begin - start, end - begin
        start = stop


def _check_inside(first: int, size: int, component: Component, where: str) -> None:
    axis = component.cut_axis
    if size < 1 or first < 0 or first + size > axis.size:
        raise CoverageError(
            f"{where} elements {first} to {first + size - 1} of axis {axis.name}, which has {axis.size}"
        )


def _prove_tiling(destination: Manifest, component: Component, layer: int, shares: list[Share]) -> None:
    axis = component.cut_axis
    where = f"layer {layer} of {component.role} on {destination.label}"
    pieces = sorted(
        ((block, share) for share in shares for block in share.blocks), key=lambda piece: piece[0].destination
    )
    end = 0
    for block, share in pieces:
        if block.destination > end:
            raise CoverageError(
                f"{where}: elements {end} to {block.destination - 1} of axis {axis.name} have no writer"
            )
        if block.destination < end:
            raise CoverageError(
                f"{where}: elements {block.destination} to {min(end, block.destination + block.size) - 1} of axis "
                f"{axis.name} have two writers, one of them source {share.source}"
            )
        end = block.destination + block.size
    if end < axis.size:
        raise CoverageError(f"{where}: elements {end} to {axis.size - 1} of axis {axis.name} have no writer")
