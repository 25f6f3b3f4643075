"""Proof that a plan writes every destination element exactly once. It looks at the copies alone, not at how they were
found: a fault in the planner ends here and not in a wrong byte."""

from collections.abc import Sequence

from sglang_hetero.errors import CoverageError
from sglang_hetero.layout.component import Component, Role
from sglang_hetero.layout.manifest import Manifest

from .share import Block, Share


def prove(destination: Manifest, shares: Sequence[Share], missing: frozenset[Role]) -> None:
    """Raise CoverageError naming the first layer, and the elements, that have no writer or more than one.

    Along the axes that are not cut every share has all of an item (its live rows, the tokens in use), so that a tiling
    of the cut axis is a tiling of the item.
    """
    writers: dict[tuple[Role, int], list[Share]] = {}
    for share in shares:
        for layer in share.layers:
            writers.setdefault((share.role, layer), []).append(share)
    for component in destination.components:
        for layer in component.layers if component.role not in missing else ():
            _prove_layer(destination, component, layer, writers.pop((component.role, layer), []))
    if writers:
        role, layer = next(iter(writers))
        raise CoverageError(f"{destination.label} has no layer {layer} of {role}, but a source would send it")


def _prove_layer(destination: Manifest, component: Component, layer: int, shares: list[Share]) -> None:
    axis = component.cut_axis
    where = f"layer {layer} of {component.role} on {destination.label}"
    pieces = sorted(
        ((block, share) for share in shares for block in share.blocks), key=lambda piece: piece[0].destination
    )
    end = 0
    for block, share in pieces:
        _check_source(block, share, where)
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
    if end != axis.size:
        what = "have no writer" if end < axis.size else "do not exist"
        raise CoverageError(
            f"{where}: elements {min(end, axis.size)} to {max(end, axis.size) - 1} of axis {axis.name} {what}"
        )


def _check_source(block: Block, share: Share, where: str) -> None:
    size = share.source_component.cut_axis.size
    if block.size < 1 or block.source < 0 or block.source + block.size > size:
        raise CoverageError(
            f"{where}: source {share.source} would read elements {block.source} to {block.source + block.size - 1} of "
            f"an axis of {size}"
        )
