"""What of a decode rank's caches has been merged: the authority on whether a request is complete."""

from sglang_hetero.errors import ProtocolError
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.plan import Plan

from .piece import Piece


class Coverage:
    """Every page of every layer of every role that the destination has, and every layer's conv and SSM, once each.

    What nobody sends (`Plan.missing`) has to be `emptied`. pages: of the request. tokens: of the request
    where they are known beforehand; otherwise the last page's pieces have to agree.
    """

    def __init__(self, plan: Plan, pages: int, tokens: int | None = None) -> None:
        page_size = plan.destination.page_size
        if pages < 1 or (tokens is not None and -(-tokens // page_size) != pages):
            raise ProtocolError(f"{tokens} tokens do not end in the last of {pages} pages of {page_size}")
        self._pages, self._page_size = pages, page_size
        self._tail = None if tokens is None else tokens - (pages - 1) * page_size
        # A bit per page, page 0 lowest; a Python integer, since runs of bits are then set and tested at once.
        self._open: dict[tuple[Role, int], int] = {}
        for component in plan.destination.components:
            whole = (1 << pages) - 1 if component.item is Item.PAGE else 1
            self._open.update(((component.role, layer), whole) for layer in component.layers)
        self._missing = {entry for entry in self._open if entry[0] in plan.missing}

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self._open

    @property
    def tokens(self) -> int | None:
        """Tokens of the request, as far as they are known: from the start, or from a piece with the last page."""
        return None if self._tail is None else (self._pages - 1) * self._page_size + self._tail

    def add(self, piece: Piece) -> None:
        """A piece has been merged. Raises ProtocolError, counting nothing, if any of it is outside or there before."""
        if piece.role is None:
            # A model of a kind that has only one of the two is no reason to fail.
            layers = [(role, piece.layer) for role in (Role.CONV, Role.SSM) if (role, piece.layer) in self._open]
            if not layers:
                raise ProtocolError(f"{piece} has been merged before, or this rank has none")
            for entry in layers:
                del self._open[entry]
            return
        if piece.role in (Role.CONV, Role.SSM):
            raise ProtocolError(f"{piece}: linear state has no pages")
        entry = (piece.role, piece.layer)
        end = piece.first_page + piece.pages
        if piece.first_page < 0 or piece.pages < 1 or end > self._pages:
            raise ProtocolError(f"{piece}: the request has {self._pages} pages")
        run = ((1 << piece.pages) - 1) << piece.first_page
        if self._open.get(entry, 0) & run != run:
            raise ProtocolError(f"{piece} has been merged before, or this rank has no such layer")
        self._check_tokens(piece, last=end == self._pages)
        left = self._open[entry] & ~run
        if left:
            self._open[entry] = left
        else:
            del self._open[entry]

    def emptied(self) -> None:
        """Whatever nobody sends is empty. Raises ProtocolError when that was said before."""
        if self._missing - self._open.keys():
            raise ProtocolError("what nobody sends was emptied before")
        for entry in self._missing:
            del self._open[entry]

    def pulled(self, role: Role, layer: int) -> None:
        """All of one layer of a role has been read and merged. Raises ProtocolError if some of it was there before."""
        whole = 1 if role in (Role.CONV, Role.SSM) else (1 << self._pages) - 1
        if self._open.get((role, layer), 0) != whole:
            raise ProtocolError(f"layer {layer} of {role} was read, but has been merged before or does not exist")
        del self._open[role, layer]

    def missing(self) -> str:
        """The first hole in words, and how many entries have one; nothing if complete."""
        if not self._open:
            return ""
        (role, layer), bits = next(iter(self._open.items()))
        others = f" and {len(self._open) - 1} more" if len(self._open) > 1 else ""
        if role in (Role.CONV, Role.SSM):
            return f"layer {layer} of {role}{others}"
        first = (bits & -bits).bit_length() - 1
        rest = ~(bits >> first)
        count = (rest & -rest).bit_length() - 1
        return f"pages {first} to {first + count - 1} of {self._pages} of layer {layer} of {role}{others}"

    def _check_tokens(self, piece: Piece, *, last: bool) -> None:
        """A peer that counts fewer tokens than we would leave the end of the last page as it was: silently wrong."""
        tail = piece.tokens - (piece.pages - 1) * self._page_size
        wanted = self._tail if last and self._tail is not None else None if last else self._page_size
        if not 1 <= tail <= self._page_size or (wanted is not None and tail != wanted):
            raise ProtocolError(
                f"{piece}: its last page has {tail} tokens, must have {wanted or f'1 to {self._page_size}'}"
            )
        if last:
            self._tail = tail
