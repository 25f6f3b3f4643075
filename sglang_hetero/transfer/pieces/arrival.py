"""Decode's view of a unit: where in it each source's part of a piece lies."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from sglang_hetero.errors import StagingError
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.plan import Plan

from .piece import Entry, Piece, SourceSide, sides_of
from .window import Window


class Sliceable(Protocol):
    """Bytes of which a slice is a view: a tensor, a numpy array, a memoryview."""

    def __getitem__(self, where: slice, /) -> Any: ...


View = TypeVar("View", bound=Sliceable)


class DestinationSide:
    """One decode rank's part of a plan."""

    def __init__(self, plan: Plan, window: Window) -> None:
        """Raises StagingError if the window's areas are too small for the plan."""
        self._sides = sides_of(plan)
        self._window = window
        self._page_size = plan.destination.page_size
        self._sizes = _sizes(self._sides)
        for side, (offset, nbytes) in zip(self._sides, window.areas, strict=True):
            need = side.area_bytes(window.pages_per_piece)
            if nbytes < need or offset + nbytes > window.unit_bytes:
                raise StagingError(
                    f"source {side.source} has {nbytes} bytes at {offset} in a unit of {window.unit_bytes}, needs "
                    f"{need}"
                )

    def nbytes(self, piece: Piece) -> int:
        """Bytes that a piece brings to this rank: what its sources write of it, together. 0 where nothing comes."""
        by_token, whole, slot = self._sizes.get(piece.entry, (0, 0, 0))
        return by_token * piece.tokens // self._page_size + whole * piece.pages + slot

    def areas(self, piece: Piece, unit: View) -> list[tuple[Role, dict[int, View]]]:
        """What there is to merge of a piece that lies in `unit`: per role, by source number, the bytes it wrote.

        unit: uint8, one-dimensional, `unit_bytes` long. One role for pages; conv, SSM or both for linear state. Each
        slice has room for all of the piece's pages, full or not, as `Assembler` wants it.
        """
        found: dict[Role, dict[int, View]] = {}
        for side, (offset, _) in zip(self._sides, self._window.areas, strict=True):
            for part in side.parts(piece):
                items = piece.pages if part.share.item is Item.PAGE else 1
                start = offset + part.offset
                found.setdefault(part.share.role, {})[side.source] = unit[
                    start : start + items * part.share.staged_bytes
                ]
        return list(found.items())


def _sizes(sides: Iterable[SourceSide]) -> Mapping[Entry, tuple[int, int, int]]:
    """What all sources send of an entry, in bytes: of a page by its tokens, of a page in any case, of the slot."""
    found: dict[Entry, tuple[int, int, int]] = {}
    for side in sides:
        for entry, parts in side.entries.items():
            by_token, whole, slot = found.get(entry, (0, 0, 0))
            for share in (part.share for part in parts):
                if share.item is not Item.PAGE:
                    slot += share.staged_bytes
                elif share.moves_tail_alone:
                    by_token += share.staged_bytes
                else:
                    whole += share.staged_bytes
            found[entry] = by_token, whole, slot
    return found
