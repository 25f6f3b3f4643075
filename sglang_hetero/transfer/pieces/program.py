"""The sequence of pieces of one prefill stage: defined by what prefill's scheduler says, never by timing.

Both sides build it from the same plan and the same pages per piece, so that a number alone names a piece.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from sglang_hetero.errors import ProtocolError
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.reshard.plan import Plan

from .piece import Entry, Piece, SourceSide
from .progress import COMPLETE, Group, Mark

_ORDER = {role: number for number, role in enumerate(Role)}
"""Of the entries of one layer: as Role lists them, with linear state in the place of conv."""


class StateMode(StrEnum):
    """How the linear state comes to decode, which chooses it for each request; names go over the wire."""

    PREPUSH = "prepush"
    """Prefill writes each layer's state as soon as its last chunk has run through the layer."""
    PUSH = "push"
    """The same pieces at the end of the last chunk, behind its attention KV."""
    PULL = "pull"
    """Decode reads it when the first token is known."""


def pulled(plan: Plan) -> list[tuple[Role, int]]:
    """(role, layer) of what decode reads in StateMode.PULL: conv, SSM, and draft caches that lie in whole pages.

    A draft cache of which some source would have to gather heads is written in every mode: what is gathered has no
    address that decode could read.
    """
    gathered = {share.role for share in plan.shares if share.packed}
    return sorted(
        {
            (share.role, layer)
            for share in plan.shares
            if share.item is Item.SLOT or (share.role.draft and share.role not in gathered)
            for layer in share.layers
        }
    )


class StageProgram:
    """What the sources of one pipeline stage send of a request, in order.

    pages_per_piece: of every paged role that the stage sends; from decode, so the source checks with
    `SourceSide.area_bytes` that its area holds as much. Raises ProtocolError where it does not fit the plan.
    """

    def __init__(self, plan: Plan, stage: int, pages_per_piece: Mapping[Role, int], mode: StateMode) -> None:
        self.stage, self.mode = stage, mode
        self.page_size = plan.destination.page_size
        self.sources = tuple(
            number for number, source in enumerate(plan.sources) if source.coordinates.pp_rank == stage
        )
        if not self.sources:
            raise ProtocolError(f"prefill has no stage {stage}; it has {plan.sources[0].coordinates.pp_size}")
        sharers: dict[Entry, list[int]] = {}
        for number in self.sources:
            for entry in SourceSide(plan, number).entries:
                sharers.setdefault(entry, []).append(number)
        ordered = sorted(sharers, key=lambda entry: (_mark(entry, mode), _ORDER[entry[0] or Role.CONV]))
        self._sharers = {entry: frozenset(sharers[entry]) for entry in ordered}
        left_out = {role if role.draft else None for role, _ in pulled(plan)} if mode is StateMode.PULL else set()
        self._pushed = [entry for entry in ordered if entry[0] not in left_out]
        self._pulled = [entry for entry in ordered if entry[0] in left_out]
        self._marks = [_mark(entry, mode) for entry in self._pushed]
        self._pages: dict[Role, int] = {}
        for role in dict.fromkeys(role for role, _ in ordered if role is not None):
            self._pages[role] = pages_per_piece.get(role, 0)
            if self._pages[role] < 1:
                raise ProtocolError(f"{role}: {self._pages[role]} pages per piece, must be 1 or more")

    @property
    def pulls(self) -> bool:
        """Whether decode reads something of this stage itself."""
        return bool(self._pulled)

    def chunk(self, first_page: int, pages: int, tokens: int, *, last: bool) -> tuple[Piece, ...]:
        """The pieces of one chunk of the prompt that completes these pages.

        tokens: in use in them; only the last page of the request's last chunk may be partly filled. pages: may be 0.
        Layer by layer, keys before values; linear state with the last chunk; draft roles behind all others.
        """
        found, _ = self.part(first_page, pages, tokens, last=last, start=0, upto=COMPLETE)
        return found

    def part(
        self, first_page: int, pages: int, tokens: int, *, last: bool, start: int, upto: Mark
    ) -> tuple[tuple[Piece, ...], int]:
        """What `upto` adds to the first `start` entries of a chunk, and how many entries that makes.

        An entry is one role of one layer, or its linear state; the parts of a chunk, in order, are the chunk.
        """
        self._check_run(first_page, pages, tokens, partly=last)
        end = max(start, bisect_right(self._marks, upto))
        found: list[Piece] = []
        for role, layer in self._pushed[start:end]:
            if role is not None:
                found += self._runs(role, layer, first_page, pages, tokens)
            elif last:
                found.append(Piece(None, layer))
        return tuple(found), end

    def whole(self, chunk_ends: Sequence[int], tokens: int) -> tuple[Piece, ...]:
        """The sequence of a whole request: what FirstGeneration's chunks say must have been sent.

        chunk_ends: the page behind the last one of each chunk. Raises ProtocolError unless they lead to the last page.
        """
        chunks = self._chunks(chunk_ends, tokens)
        return tuple(piece for chunk, last in chunks for piece in self.chunk(*chunk, last=last))

    def total(self, chunk_ends: Sequence[int], tokens: int) -> int:
        """How many pieces `whole` has, without making them."""
        total = 0
        for (_, pages, _), last in self._chunks(chunk_ends, tokens):
            for role, _ in self._pushed:
                total += last if role is None else -(-pages // self._pages[role])
        return total

    def reads(self, tokens: int) -> tuple[Piece, ...]:
        """What decode reads of this stage itself, in pieces that fit a unit; nothing unless the mode is PULL."""
        found: list[Piece] = []
        for role, layer in self._pulled:
            if role is None:
                found.append(Piece(None, layer))
            else:
                found += self._runs(role, layer, 0, -(-tokens // self.page_size), tokens)
        return tuple(found)

    def sharers(self, piece: Piece, request_pages: int | None = None) -> frozenset[int]:
        """Numbers of the sources that write a piece, which may be whatever a peer has said.

        request_pages: of the request, to refuse what lies behind them. Raises ProtocolError if this stage writes no
        such piece.
        """
        sharers = self._sharers.get(piece.entry)
        if sharers is None:
            raise ProtocolError(f"stage {self.stage} holds no {piece}")
        if piece.role is None:
            if self.mode is StateMode.PULL:
                raise ProtocolError(f"{piece} was written, but decode reads it itself")
            if (piece.first_page, piece.pages, piece.tokens) != (0, 0, 0):
                raise ProtocolError(f"{piece} has pages or tokens: {piece.to_wire()}")
            return sharers
        if piece.entry in self._pulled:
            raise ProtocolError(f"{piece} was written, but decode reads it itself")
        if not 1 <= piece.pages <= self._pages[piece.role]:
            raise ProtocolError(f"{piece}: a piece has 1 to {self._pages[piece.role]} pages")
        at_end = request_pages is None or piece.first_page + piece.pages == request_pages
        self._check_run(piece.first_page, piece.pages, piece.tokens, partly=at_end)
        if request_pages is not None and piece.first_page + piece.pages > request_pages:
            raise ProtocolError(f"{piece}: the request has {request_pages} pages")
        return sharers

    def _chunks(self, chunk_ends: Sequence[int], tokens: int) -> Iterator[tuple[tuple[int, int, int], bool]]:
        """First page, pages and tokens of each chunk, and whether it is the last."""
        pages = -(-tokens // self.page_size)
        if tokens < 1 or not chunk_ends or chunk_ends[-1] != pages:
            raise ProtocolError(
                f"chunks end at page {[*chunk_ends[-1:]]} of a request of {tokens} tokens, {pages} pages"
            )
        first = 0
        for number, end in enumerate(chunk_ends, 1):
            last = number == len(chunk_ends)
            used = min(tokens, end * self.page_size) - first * self.page_size
            if end < first or (not last and used < (end - first) * self.page_size):
                raise ProtocolError(
                    f"chunk {number} of {len(chunk_ends)} goes from page {first} to {end} of a request of {tokens} "
                    f"tokens, {pages} pages"
                )
            yield (first, end - first, max(used, 0)), last
            first = end

    def _runs(self, role: Role, layer: int, first_page: int, pages: int, tokens: int) -> Iterator[Piece]:
        step = self._pages[role]
        for start in range(0, pages, step):
            count = min(step, pages - start)
            used = min(tokens - start * self.page_size, count * self.page_size)
            yield Piece(role, layer, first_page + start, count, used)

    def _check_run(self, first_page: int, pages: int, tokens: int, *, partly: bool) -> None:
        least = (pages - 1) * self.page_size + 1 if partly and pages else pages * self.page_size
        if first_page < 0 or pages < 0 or not least <= tokens <= pages * self.page_size:
            raise ProtocolError(
                f"{tokens} tokens in {pages} pages of {self.page_size} from page {first_page} on: no run of pages that "
                f"{'ends a request' if partly else 'are full'}"
            )


def _mark(entry: Entry, mode: StateMode) -> Mark:
    """When an entry is there: the place of its caches in a forward pass, and with it that in the sequence."""
    role, layer = entry
    if role is not None and role.draft:
        return Mark(Group.DRAFT, layer)
    return Mark(Group.STATE if role is None and mode is StateMode.PUSH else Group.TARGET, layer)
