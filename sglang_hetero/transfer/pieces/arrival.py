"""Decode's view of a unit: where in it each source's part of a piece lies."""

from typing import Any, Protocol, TypeVar

from sglang_hetero.errors import StagingError
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.plan import Plan

from .piece import Piece, sides_of
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
        for side, (offset, nbytes) in zip(self._sides, window.areas, strict=True):
            need = side.area_bytes(window.pages_per_piece)
            if nbytes < need or offset + nbytes > window.unit_bytes:
                raise StagingError(
                    f"source {side.source} has {nbytes} bytes at {offset} in a unit of {window.unit_bytes}, needs "
                    f"{need}"
                )

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
