"""Bind: the addresses of one request, from a plan and the pages and slot that its source holds.

A piece is one role of one layer for one run of pages (a chunk of the prompt), or for the slot. Its bytes lie in staging
without gaps from the start of the source's area, page after page in the order of the request. Where a share is packed,
the source gathers them in that order first and sends the buffer.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hetero.errors import BindError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import Component, Item

from .plan import Plan
from .share import Offsets, Runs, Share, coalesce

Pages = npt.NDArray[np.int64]
"""Ids of a request's pages in one rank's pool, in the order of its tokens."""


@dataclass(frozen=True)
class Descriptors:
    """Bytes to move for one piece: `sizes[i]` from address `source[i]` to `staged[i]`, all uint64.

    staged counts from the start of the source's area. source is an address, or if `packed` an offset in the buffer into
    which the source gathers the piece.
    """

    source: Offsets
    staged: Offsets
    sizes: Offsets
    packed: bool

    def __len__(self) -> int:
        return len(self.sizes)

    def at(self, address: int) -> "Descriptors":
        """The same for a layer that begins at `address`; a gathered piece lies in its buffer wherever the layer is."""
        if self.packed:
            return self
        return Descriptors(self.source + np.uint64(address), self.staged, self.sizes, packed=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return int(self.sizes.sum())


@dataclass(frozen=True)
class Piece:
    """What one source sends at a time. first_page and pages count within the request; 0 and 1 for a slot."""

    share: Share
    layer: int
    first_page: int
    pages: int
    tokens: int
    descriptors: Descriptors


@dataclass(frozen=True)
class Binding:
    """Everything that one source sends of one request, in order of chunks, then as the plan lists its shares."""

    pieces: tuple[Piece, ...]

    def of(self, item: Item) -> Iterator[Piece]:
        """The pieces of paged components, or those of slots."""
        return (piece for piece in self.pieces if piece.share.item is item)


def item_runs(ids: Pages) -> list[Pages]:
    """The ids split where one is not the successor of the one before it."""
    return np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)


def chunk_pages(tokens: int, chunk_tokens: int, page_size: int) -> list[range]:
    """The pages that each prefill chunk completes; a page that a chunk only begins goes with a later one.

    tokens: of the prompt. The last range includes the last page, full or not.
    """
    if tokens < 1 or chunk_tokens < 1 or page_size < 1:
        raise BindError(f"tokens {tokens}, chunk {chunk_tokens} and page size {page_size} must be 1 or more")
    ends = [end // page_size for end in range(chunk_tokens, tokens, chunk_tokens)]
    ends.append(-(-tokens // page_size))
    starts = [0, *ends[:-1]]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def bind(
    plan: Plan,
    source: int,
    *,
    pages: Sequence[int] | Pages,
    slot: int,
    tokens: int,
    chunks: Sequence[range] | None = None,
) -> Binding:
    """All pieces of one request that source number `source` of the plan sends.

    pages: page ids at that source, enough for `tokens`; slot: its linear-state slot. chunks: runs of positions in
    `pages`, one after another from 0 to the end; one chunk if None. Raises BindError for what the pools do not have.
    """
    source = _integer(source, "source")
    if not 0 <= source < len(plan.sources):
        raise BindError(f"source {source} does not exist: the plan has {len(plan.sources)} sources, counted from 0")
    slot = _integer(slot, "slot")
    shares = plan.of(source)
    page_size = plan.destination.page_size
    ids = _page_ids(pages, tokens, page_size)
    ranges = [range(len(ids))] if chunks is None else chunks
    _check_chunks(ranges, len(ids))
    paged = [share for share in shares if share.item is Item.PAGE]
    for share in paged:
        _check_items(share.source_component, ids)
    pieces: list[Piece] = []
    for chunk in ranges:
        used = min(tokens, chunk.stop * page_size) - chunk.start * page_size
        for share in paged:
            descriptors = _pages_at_zero(share, ids[chunk.start : chunk.stop], used)
            pieces += _of_layers(share, descriptors, chunk.start, len(chunk), used)
    for share in shares:
        if share.item is Item.SLOT:
            pieces += _of_layers(share, _slot_at_zero(share, slot), 0, 1, 0)
    return Binding(tuple(pieces))


def bind_pages(share: Share, layer: int, pages: Sequence[int] | Pages, tokens: int) -> Descriptors:
    """What moves `tokens` tokens that lie in `pages` (ids at the source) of one layer. Raises BindError."""
    _check_share(share, Item.PAGE, layer)
    ids = _page_ids(pages, tokens, _page_size(share))
    _check_items(share.source_component, ids)
    return _pages_at_zero(share, ids, tokens).at(share.source_component.address(layer))


def bind_slot(share: Share, layer: int, slot: int) -> Descriptors:
    """What moves one layer of a linear-state slot (its index at the source). Raises BindError."""
    _check_share(share, Item.SLOT, layer)
    return _slot_at_zero(share, slot).at(share.source_component.address(layer))


def _of_layers(share: Share, descriptors: Descriptors, first_page: int, pages: int, tokens: int) -> Iterator[Piece]:
    """A piece for each layer of a share, from the descriptors of a layer that begins at address 0."""
    component = share.source_component
    for layer in share.layers:
        yield Piece(share, layer, first_page, pages, tokens, descriptors.at(component.address(layer)))


def _slot_at_zero(share: Share, slot: int) -> Descriptors:
    number = _integer(slot, "slot")
    _check_range(share.source_component, number, number)
    ids = np.array([number], dtype=np.int64)
    return _staged(_joined(_item_offsets(share.source_component, ids), share.runs, None))


def _pages_at_zero(share: Share, ids: Pages, tokens: int) -> Descriptors:
    """What moves these pages of a layer that begins at address 0, in the order of staging."""
    tail = tokens - (len(ids) - 1) * _page_size(share)
    if share.packed:
        size = (len(ids) - 1) * share.staged_bytes + share.tail_bytes(tail)
        zero = np.zeros(1, dtype=np.uint64)
        return Descriptors(zero, zero, np.array([size], dtype=np.uint64), packed=True)
    last = None if tail == _page_size(share) else share.tail_runs(tail)
    return _staged(_joined(_item_offsets(share.source_component, ids), share.runs, last))


def _joined(items: Offsets, runs: Runs, last: Runs | None) -> Runs:
    """`runs` at every item, except the last item if it has runs of its own; neighbours in memory become one."""
    full = items if last is None else items[:-1]
    offsets = (full[:, None] + runs.offsets[None, :]).reshape(-1)
    sizes = np.tile(runs.sizes, len(full))
    if last is not None:
        offsets = np.concatenate([offsets, items[-1] + last.offsets])
        sizes = np.concatenate([sizes, last.sizes])
    return coalesce(offsets, sizes)


def _staged(runs: Runs) -> Descriptors:
    """Runs laid one behind the other in staging."""
    return Descriptors(runs.offsets, np.cumsum(runs.sizes) - runs.sizes, runs.sizes, packed=False)


def _item_offsets(component: Component, ids: Pages) -> Offsets:
    # uint64, not the int64 of the ids: a page's offset may need more than 63 bits of an address space.
    return ids.astype(np.uint64) * np.uint64(component.item_stride)


def _page_size(share: Share) -> int:
    return share.source_component.axis(AxisName.TOKEN).size


def _page_ids(pages: Sequence[int] | Pages, tokens: int, page_size: int) -> Pages:
    try:
        ids = np.asarray(pages)
    except ValueError:
        raise BindError("pages must be a row of integers") from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise BindError(f"pages must be a row of integers, they are {ids.dtype} of shape {ids.shape}")
    tokens = _integer(tokens, "tokens")
    needed = -(-tokens // page_size)
    if tokens < 1 or len(ids) != needed:
        raise BindError(f"{tokens} tokens take {max(needed, 0)} pages of {page_size}, {len(ids)} were given")
    ordered = np.sort(ids)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise BindError(f"page {ordered[twice[0]]} is given twice: a request's pages are its own")
    return ids.astype(np.int64)


def _integer(value: int, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise BindError(f"{what} must be an integer, not {value!r}") from None


def _check_share(share: Share, item: Item, layer: int) -> None:
    if share.item is not item or layer not in share.layers:
        raise BindError(f"the share of source {share.source} has no {item} of layer {layer}: it is {share.role}")


def _check_chunks(chunks: Sequence[range], pages: int) -> None:
    if not isinstance(chunks, Sequence):
        raise BindError(f"chunks must be a row of ranges, not {chunks!r}")
    position = 0
    for chunk in chunks:
        if not isinstance(chunk, range) or chunk.step != 1 or chunk.start != position or chunk.stop <= chunk.start:
            raise BindError(f"chunks must follow each other from page 0, but {chunk} comes at page {position}")
        position = chunk.stop
    if position != pages:
        raise BindError(f"the chunks end at page {position} of a request of {pages} pages")


def _check_items(component: Component, ids: Pages) -> None:
    """Raise BindError unless every id is a page or slot of the pool other than SGLang's padding item 0."""
    _check_range(component, int(ids.min()), int(ids.max()))


def _check_range(component: Component, low: int, high: int) -> None:
    if low < 1 or high >= component.items:
        raise BindError(
            f"{component.role}: {component.item} {low if low < 1 else high} does not exist: ids go from 1 to "
            f"{component.items - 1}, 0 is padding"
        )
