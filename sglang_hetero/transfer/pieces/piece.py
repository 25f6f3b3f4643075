"""A piece, and the parts of it that one source sends: what both sides call the same thing."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_hetero.errors import BindError, ProtocolError
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.bind import Descriptors, bind_pages, bind_slot
from sglang_hetero.reshard.plan import Plan
from sglang_hetero.reshard.share import Share

ALIGN = 64
"""Bytes. Areas, and SSM behind conv in one, begin at multiples of it: a cache line of the hosts, twice the 32-byte
blocks that an NPU's copies move, and a multiple of every element's size, which the merge's views need."""

STATE = ""
"""What the wire says for the role of a piece of linear state."""

Entry = tuple[Role | None, int]
"""A role, None for linear state, and a layer: everything about a piece but its pages."""

Ids = npt.NDArray[np.int64]
"""Page ids of a request in one rank's pool, indexed by position in the request."""


def aligned(nbytes: int, alignment: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Piece:
    """One role of one layer for one run of pages, or one layer's linear state (conv and SSM together).

    role: None for linear state. first_page: position in the request. tokens: how many of the run are in use. The last
    three are 0 for state.
    """

    role: Role | None
    layer: int
    first_page: int = 0
    pages: int = 0
    tokens: int = 0

    @property
    def entry(self) -> Entry:
        return self.role, self.layer

    def __str__(self) -> str:
        if self.role is None:
            return f"linear state of layer {self.layer}"
        last = self.first_page + self.pages - 1
        return f"pages {self.first_page} to {last} ({self.tokens} tokens) of layer {self.layer} of {self.role}"

    def to_wire(self) -> tuple[str, int, int, int, int]:
        """The fields as a message has them."""
        return STATE if self.role is None else self.role.value, self.layer, self.first_page, self.pages, self.tokens

    @classmethod
    def from_wire(cls, role: str, layer: int, first_page: int, pages: int, tokens: int) -> "Piece":
        """The reverse. Raises ProtocolError for a role that does not exist; `StageProgram.sharers` checks the rest."""
        try:
            return cls(None if role == STATE else Role(role), layer, first_page, pages, tokens)
        except ValueError:
            raise ProtocolError(f"a piece of role {role[:32]!r}, which does not exist") from None


@dataclass(frozen=True)
class Part:
    """What one source contributes of one role to a piece; its bytes begin at `offset` in the source's area."""

    share: Share
    layer: int
    offset: int


class SourceSide:
    """One source's part of a plan. The source itself has one for each destination, decode one for each source."""

    def __init__(self, plan: Plan, source: int) -> None:
        self.plan, self.source = plan, source
        shares: dict[tuple[Role, int], Share] = {}
        for share in plan.of(source):
            for layer in share.layers:
                shares[share.role, layer] = share
        self._parts: dict[Entry, tuple[Part, ...]] = {}
        for (role, layer), share in shares.items():
            if share.item is Item.PAGE:
                self._parts[role, layer] = (Part(share, layer, 0),)
            elif (None, layer) not in self._parts:
                self._parts[None, layer] = _state_parts(shares, layer)

    @property
    def entries(self) -> Mapping[Entry, tuple[Part, ...]]:
        """Everything that the source sends, whatever the pages."""
        return self._parts

    @cached_property
    def state_bytes(self) -> int:
        """Bytes that the largest piece of linear state takes in the source's area; 0 if it has none."""
        return max((_end(parts, 0) for (role, _), parts in self._parts.items() if role is None), default=0)

    @cached_property
    def page_bytes(self) -> Mapping[Role, int]:
        """Per paged role the bytes that one page takes, at most, in the source's area."""
        found: dict[Role, int] = {}
        for (role, _), parts in self._parts.items():
            if role is not None:
                found[role] = max(found.get(role, 0), _end(parts, 1))
        return found

    def area_bytes(self, pages_per_piece: Mapping[Role, int]) -> int:
        """Bytes that the source needs in a unit: aligned, and what it has to compare with the area it was given.

        pages_per_piece: of every paged role that it sends. Raises ProtocolError if one is missing.
        """
        missing = sorted(self.page_bytes.keys() - pages_per_piece.keys())
        if missing:
            raise ProtocolError(f"nothing says how many pages of {missing[0]} a piece has")
        paged = (pages_per_piece[role] * nbytes for role, nbytes in self.page_bytes.items())
        return aligned(max((self.state_bytes, *paged)))

    def parts(self, piece: Piece) -> tuple[Part, ...]:
        """What the source contributes to a piece; nothing if it has no share of it."""
        return self._parts.get(piece.entry, ())

    def nbytes(self, piece: Piece) -> int:
        """Room that the source's parts of a piece take in a unit; a page that is not full counts as one."""
        parts = self.parts(piece)
        return _end(parts, piece.pages) if parts else 0

    def descriptors(self, piece: Piece, page_ids: Ids, slot: int) -> list[tuple[Part, Descriptors]]:
        """What moves a piece, with `staged` counted from the start of the source's area.

        page_ids: at the source, of all pages of the request that are known so far; slot: its linear-state slot there.
        A packed part is gathered by the caller first (merge.pack_pages). The same descriptors serve decode for reading.
        Raises BindError for ids that the source's pool does not have.
        """
        parts = self.parts(piece)
        if piece.role is None:
            return [(part, _shifted(bind_slot(part.share, part.layer, slot), part.offset)) for part in parts]
        if not parts:
            return []
        ids = pages_of(piece, page_ids)
        return [(part, bind_pages(part.share, part.layer, ids, piece.tokens)) for part in parts]


def pages_of(piece: Piece, page_ids: Ids) -> Ids:
    """The ids of a piece's pages, from those of the request. Raises BindError if not all of them are known."""
    end = piece.first_page + piece.pages
    if end > len(page_ids):
        raise BindError(f"{piece}: only {len(page_ids)} pages of the request are known")
    return page_ids[piece.first_page : end]


def sides_of(plan: Plan) -> tuple[SourceSide, ...]:
    """The part of every source, by number."""
    return tuple(SourceSide(plan, source) for source in range(len(plan.sources)))


def _state_parts(shares: Mapping[tuple[Role, int], Share], layer: int) -> tuple[Part, ...]:
    """Conv at the start of the area and SSM behind it. Both sides compute this from the plan: the one place for it."""
    parts, offset = [], 0
    for role in (Role.CONV, Role.SSM):
        share = shares.get((role, layer))
        if share is not None:
            parts.append(Part(share, layer, offset))
            offset += aligned(share.staged_bytes)
    return tuple(parts)


def _end(parts: tuple[Part, ...], pages: int) -> int:
    """Where the last part ends in the area; `pages` for paged parts, a slot counts as one item."""
    last = parts[-1]
    return last.offset + last.share.staged_bytes * (pages if last.share.item is Item.PAGE else 1)


def _shifted(descriptors: Descriptors, offset: int) -> Descriptors:
    if not offset:
        return descriptors
    staged = descriptors.staged + np.uint64(offset)
    return Descriptors(descriptors.source, staged, descriptors.sizes, descriptors.packed)
