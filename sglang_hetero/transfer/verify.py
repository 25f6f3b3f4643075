"""Digests of what was read and of what was merged: the end-to-end check of a piece, for finding faults.

One per head and page, or per head and segment of linear state, over the live elements in the order in which the
component's axes are described. So equal content gives equal digests whatever the two layouts: strides, conv windows
either way round, dead rows, any TP sizes. Each side goes by its own memory and description, never by the plan's copies.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_hetero.errors import BindError, MergeError, MessageError
from sglang_hetero.layout.axes import AxisName
from sglang_hetero.layout.component import PLAIN, Component, Item, Role
from sglang_hetero.layout.limits import MAX_SEGMENTS
from sglang_hetero.layout.manifest import Manifest
from sglang_hetero.merge.assemble import Memory
from sglang_hetero.merge.views import item_view, live_view
from sglang_hetero.reshard.plan import Plan
from sglang_hetero.reshard.share import Share

from .pieces import Piece, pages_of

DIGEST_BYTES = 8
"""Of blake2b: 64 bits, so that a difference is not missed by chance in any number of pieces, from the standard library,
the same on every machine. A CRC is several times as fast, but it is linear: an exclusive or of wrong parts may have the
digest of the right ones."""

_ROW = struct.Struct("<BBIII")
"""One head on the wire: number of its role among the piece's roles, of its segment, head, first page, digests."""

Pages = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Key:
    """What a digest is of. segment: number in the cut axis; head: of the whole model; page: position in the request, 0
    for linear state."""

    role: Role
    segment: int
    head: int
    page: int


@dataclass(frozen=True, slots=True)
class _Head:
    """One head of a component on one rank: `width` elements from `start` on the cut axis."""

    segment: int
    number: int
    start: int
    width: int


def source_digests(  # noqa: PLR0917
    plan: Plan, source: int, piece: Piece, memory: Memory, pages: Pages, slot: int
) -> bytes:
    """What source number `source` has sent of a piece, encoded for the wire; read from its own caches.

    memory, pages, slot: as for the assembler and `SourceSide.descriptors`, of the source. Raises BindError or
    MergeError where they do not fit.
    """
    encoded = bytearray()
    for share in _shares(plan, source, piece):
        component = share.source_component
        heads = [head for head in _heads(plan.sources[source], component) if _sends(share, head)]
        encoded += _encode(
            share.role, piece, _digests(component, heads, piece, _content(component, piece, memory, pages, slot))
        )
    return bytes(encoded)


def destination_digests(plan: Plan, piece: Piece, memory: Memory, pages: Pages, slot: int) -> dict[Key, bytes]:
    """What the destination has of a piece after it was merged, read from its own caches."""
    found: dict[Key, bytes] = {}
    for component in plan.destination.components:
        if component.role in _roles(piece) and component.role not in plan.missing and piece.layer in component.layers:
            heads = _heads(plan.destination, component)
            for head, digests in _digests(component, heads, piece, _content(component, piece, memory, pages, slot)):
                for position, digest in enumerate(digests):
                    key = Key(component.role, head.segment, head.number, piece.first_page + position)
                    found[key] = digest
    return found


def compare(plan: Plan, piece: Piece, sent: Mapping[int, bytes], found: Mapping[Key, bytes]) -> str | None:
    """The first difference in words, None if the destination has what was sent, all of it and nothing else.

    sent: per source number the bytes that it said, which may be anything. found: of `destination_digests`.
    """
    left = dict(found)
    for source, encoded in sorted(sent.items()):
        label = plan.sources[source].label if 0 <= source < len(plan.sources) else f"source {source}"
        try:
            digests = decode(encoded, piece)
        except MessageError as error:
            return f"{piece}: {label}: {error}"
        for key, digest in digests.items():
            here = left.pop(key, None)
            if here is None:
                return f"{_in_words(plan, piece, key)}: {label} sent it, but nobody or somebody else was to"
            if here != digest:
                return (
                    f"{_in_words(plan, piece, key)}: {label} sent {digest.hex()}, {plan.destination.label} has "
                    f"{here.hex()}"
                )
    if left:
        return f"{_in_words(plan, piece, next(iter(left)))}: {plan.destination.label} has it, but no source sent it"
    return None


def decode(encoded: bytes, piece: Piece) -> dict[Key, bytes]:
    """Digests by what they are of, from whatever a peer has sent. Raises MessageError."""
    roles, found, position = _roles(piece), {}, 0
    last = piece.first_page + max(piece.pages, 1)
    while position < len(encoded):
        if position + _ROW.size > len(encoded):
            raise MessageError(f"digests end within a head, at byte {position} of {len(encoded)}")
        role, segment, head, first, count = _ROW.unpack_from(encoded, position)
        position += _ROW.size
        if role >= len(roles) or segment >= MAX_SEGMENTS:
            raise MessageError(f"digests of role {role} and segment {segment}, which do not exist")
        if first < piece.first_page or first + count > last or not count:
            raise MessageError(f"digests of {count} pages from {first} on, not of {piece}")
        if position + count * DIGEST_BYTES > len(encoded):
            raise MessageError(f"{count} digests announced at byte {position} of {len(encoded)}")
        for page in range(first, first + count):
            key = Key(roles[role], segment, head, page)
            if key in found:
                raise MessageError(f"two digests of head {head} in segment {segment}, page {page}")
            found[key] = encoded[position : position + DIGEST_BYTES]
            position += DIGEST_BYTES
    return found


def _roles(piece: Piece) -> tuple[Role, ...]:
    return (Role.CONV, Role.SSM) if piece.role is None else (piece.role,)


def _shares(plan: Plan, source: int, piece: Piece) -> Iterator[Share]:
    roles = _roles(piece)
    return (share for share in plan.of(source) if share.role in roles and piece.layer in share.layers)


def _heads(owner: Manifest, component: Component) -> list[_Head]:
    """All heads of a component on its rank, in the order of the cut axis."""
    place, found, start = owner.coordinates, [], 0
    for number, segment in enumerate(component.cut_axis.segments):
        for head in segment.local_heads(place.tp_size, place.tp_rank):
            found.append(_Head(number, head, start, segment.width))
            start += segment.width
    return found


def _sends(share: Share, head: _Head) -> bool:
    """Whether a source sends all of one of its heads, of which blocks are made up."""
    return any(
        block.source <= head.start and head.start + head.width <= block.source + block.size for block in share.blocks
    )


def _content(component: Component, piece: Piece, memory: Memory, pages: Pages, slot: int) -> npt.NDArray[np.generic]:
    """The items of a piece, [items, *axes as described], without rows that hold nothing."""
    if (component.role, piece.layer) not in memory:
        raise MergeError(f"layer {piece.layer} of {component.role}: there is no memory to compute digests of")
    items = live_view(item_view(memory[component.role, piece.layer], component), component)
    page_ids = np.asarray(pages, dtype=np.int64)
    ids = pages_of(piece, page_ids) if component.item is Item.PAGE else np.array([slot], dtype=np.int64)
    if not len(ids) or ids.min() < 1 or ids.max() >= component.items:
        raise BindError(f"{piece}: not all of {component.role}'s {component.item}s exist, 1 to {component.items - 1}")
    content: npt.NDArray[np.generic]
    if items.is_cpu:
        # Not by torch: its threads wait for each other, which takes many times as long where the host is busy.
        content = items.numpy()[ids]
    else:
        # On the device first, so that only these items come to the host.
        content = items.index_select(0, torch.tensor(ids, device=items.device)).cpu().numpy()
    return content


def _digests(
    component: Component, heads: Iterable[_Head], piece: Piece, content: npt.NDArray[np.generic]
) -> Iterator[tuple[_Head, list[bytes]]]:
    """Per head a digest for each page of the piece, or one for the slot."""
    names = [axis.name for axis in component.axes]
    cut = 1 + names.index(component.cut_axis.name)
    full = content
    if component.item is Item.PAGE and component.encoding == PLAIN:
        # Otherwise which bytes of a page belong to a token only its kernels know, so that all of them count.
        token = 1 + names.index(AxisName.TOKEN)
        tail = piece.tokens - (piece.pages - 1) * content.shape[token]
        full, last = content[:-1], _narrowed(content[-1:], token, 0, tail)
    else:
        last = content[:0]
    for head in heads:
        own = (_narrowed(items, cut, head.start, head.width) for items in (full, last))
        yield head, [_digest(item) for items in own for item in items]


def _narrowed(items: npt.NDArray[np.generic], axis: int, start: int, size: int) -> npt.NDArray[np.generic]:
    """A view of `size` elements along an axis."""
    return items[(slice(None),) * axis + (slice(start, start + size),)]


def _digest(elements: npt.NDArray[np.generic]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(elements).data, digest_size=DIGEST_BYTES).digest()


def _encode(role: Role, piece: Piece, digests: Iterable[tuple[_Head, list[bytes]]]) -> bytes:
    encoded = bytearray()
    for head, own in digests:
        encoded += _ROW.pack(_roles(piece).index(role), head.segment, head.number, piece.first_page, len(own))
        encoded += b"".join(own)
    return bytes(encoded)


def _in_words(plan: Plan, piece: Piece, key: Key) -> str:
    segment = f"segment {key.segment}"
    for component in plan.destination.of(key.role):
        if piece.layer in component.layers and key.segment < len(component.cut_axis.segments):
            segment = f"segment {component.cut_axis.segments[key.segment].name}"
    page = "" if piece.role is None else f", page {key.page} of the request"
    return f"{key.role}, layer {piece.layer}, {segment}, head {key.head}{page}"
