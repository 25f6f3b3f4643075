"""A plan carried out between ranks that are only numpy arrays: bytes into staging, staging into caches, compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_hetero.layout import Coordinates, Item, Role, Side
from sglang_hetero.merge.assemble import Assembler, pack_pages
from sglang_hetero.reshard import STRICT, Piece, Plan, Policy, bind, plan
from tests.harness.oracle import SOURCE_POISON

from .model import Model, live_shard, stage_of
from .rank import Bytes, Rank, Shape, first_difference

STAGING_POISON = 0x5A
AREA_MARGIN = 64
"""Bytes behind a staging area that nobody may write."""


@dataclass(frozen=True)
class Place:
    """Where one rank keeps a request: page ids in the order of its tokens, and its slot."""

    pages: tuple[int, ...]
    slot: int


@dataclass(frozen=True)
class Request:
    """One request. chunks: runs of pages as prefill completes them; None is all at once. seed: of its values."""

    tokens: int
    chunks: tuple[range, ...] | None = None
    seed: int = 1


@dataclass
class Moved:
    """What went over the wire to one destination: number of descriptors and bytes per source and role."""

    descriptors: dict[tuple[int, Role], int]
    nbytes: dict[tuple[int, Role], int]


def prefill_ranks(model: Model, tp: int, shape: Shape, *, stages: int = 1, dp: tuple[int, int] = (0, 1)) -> list[Rank]:
    """All ranks of one prefill replica, (stage, TP rank) in order."""
    return [
        Rank(stage_of(model, stage, stages), Side.PREFILL, _coordinates(rank, tp, stage, stages, dp), shape)
        for stage in range(stages)
        for rank in range(tp)
    ]


def decode_rank(model: Model, tp: int, rank: int, shape: Shape, *, dp: tuple[int, int] = (0, 1)) -> Rank:
    """One decode rank."""
    return Rank(model, Side.DECODE, _coordinates(rank, tp, 0, 1, dp), shape)


def _coordinates(rank: int, tp: int, stage: int, stages: int, dp: tuple[int, int]) -> Coordinates:
    return Coordinates(tp_rank=rank, tp_size=tp, pp_rank=stage, pp_size=stages, dp_rank=dp[0], dp_size=dp[1])


def places(rng: np.random.Generator, ranks: int, shape: Shape, tokens: int) -> list[Place]:
    """Random distinct pages and a random slot on each rank; never the padding item 0."""
    count = -(-tokens // shape.page_size)
    assert count <= shape.pages, "the pool is too small for the request"
    return [
        Place(
            tuple(int(page) for page in rng.permutation(np.arange(1, shape.pages + 1))[:count]),
            int(rng.integers(1, shape.slots + 1)),
        )
        for _ in range(ranks)
    ]


def move(
    the_plan: Plan, sources: Sequence[Rank], held: Sequence[Place], *, to: Rank, into: Place, request: Request
) -> Moved:
    """Carry out a plan. `sources` in the order of the plan; `held`: where each has the request."""
    moved = Moved({}, {})
    arrived: dict[tuple[Role, int, int], dict[int, Bytes]] = {}
    pieces: dict[tuple[Role, int, int], Piece] = {}
    for number, (source, place) in enumerate(zip(sources, held, strict=True)):
        bound = bind(the_plan, number, pages=place.pages, slot=place.slot, tokens=request.tokens, chunks=request.chunks)
        for piece in bound.pieces:
            key = (piece.share.role, piece.layer, piece.first_page)
            first = pieces.setdefault(key, piece)
            assert (first.pages, first.tokens) == (piece.pages, piece.tokens), "sources cut the request differently"
            arrived.setdefault(key, {})[number] = _send(piece, source, place)
            counter = (number, piece.share.role)
            moved.descriptors[counter] = moved.descriptors.get(counter, 0) + len(piece.descriptors)
            moved.nbytes[counter] = moved.nbytes.get(counter, 0) + piece.descriptors.nbytes
    memory = {key: torch.from_numpy(to.bytes_from(buffer.address)) for key, buffer in to.buffers.items()}
    assembler = Assembler(the_plan, memory)
    for (role, layer, _), areas in arrived.items():
        assert set(assembler.sources(role, layer)) == set(areas), "merge waits for other sources than those that send"
    merge(assembler, arrived, pieces, into)
    return moved


def merge(
    assembler: Assembler,
    arrived: Mapping[tuple[Role, int, int], Mapping[int, Bytes]],
    pieces: Mapping[tuple[Role, int, int], Piece],
    into: Place,
) -> None:
    """All pieces, by role, layer and first page, from the areas that their sources have written."""
    for (role, layer, first_page), areas in arrived.items():
        piece = pieces[role, layer, first_page]
        tensors = {number: torch.from_numpy(area) for number, area in areas.items()}
        if piece.share.item is Item.SLOT:
            assembler.merge_slot(role, layer, torch.tensor([into.slot]), tensors)
            continue
        pages = torch.tensor(into.pages[first_page : first_page + piece.pages])
        assembler.merge_pages(role, layer, pages, piece.tokens, tensors)


def _send(piece: Piece, source: Rank, place: Place) -> Bytes:
    """The staging area of one piece after the source has written it, with room for whole items."""
    descriptors, share = piece.descriptors, piece.share
    packed: Bytes | None = None
    if descriptors.packed:
        packed = np.full(piece.pages * share.staged_bytes, STAGING_POISON, dtype=np.uint8)
        pages = torch.tensor(place.pages[piece.first_page : piece.first_page + piece.pages])
        address = source.buffers[share.role, piece.layer].address
        memory = torch.from_numpy(source.bytes_from(address))
        pack_pages(share, memory, pages, piece.tokens, torch.from_numpy(packed))
    room = piece.pages * share.staged_bytes
    area = np.full(room + AREA_MARGIN, STAGING_POISON, dtype=np.uint8)
    written = np.zeros(room + AREA_MARGIN, dtype=bool)
    for start, staged, size in zip(
        descriptors.source.tolist(), descriptors.staged.tolist(), descriptors.sizes.tolist(), strict=True
    ):
        assert size > 0 and staged + size <= room, f"{size} bytes at {staged} leave the staging area of {room}"
        assert not written[staged : staged + size].any(), f"staged bytes {staged} to {staged + size - 1} written twice"
        written[staged : staged + size] = True
        if packed is None:
            area[staged : staged + size] = source.read(start, size)
        else:
            assert start + size <= len(packed), f"{size} bytes at {start} leave the packed buffer of {len(packed)}"
            area[staged : staged + size] = packed[start : start + size]
    assert written[: descriptors.nbytes].all(), "staged bytes do not follow each other from the start of the area"
    return area[:room]


def check(
    sources: Sequence[Rank],
    held: Sequence[Place],
    *,
    to: Rank,
    into: Place,
    request: Request,
    policy: Policy = STRICT,
) -> Moved:
    """Plan, bind, move and merge one request, then compare every byte of the destination. `sources` are written."""
    the_plan = plan([source.manifest for source in sources], to.manifest, policy)
    moved = move(the_plan, sources, held, to=to, into=into, request=request)
    expected = Rank(to.model, to.side, to.coordinates, to.shape)
    expected.write(request.seed, into.pages, into.slot, request.tokens, skip=policy.start_empty)
    used = request.tokens - (len(into.pages) - 1) * to.shape.page_size
    for role, form in to.shape.formats.items():
        if form.encoding != "plain":
            expected.fill_tail(role, into.pages[-1], used, SOURCE_POISON)
    difference = first_difference(expected, to)
    assert difference is None, difference
    _check_bytes(moved, to, request, policy.start_empty, whole_pages=len(into.pages))
    return moved


def _check_bytes(moved: Moved, to: Rank, request: Request, skip: frozenset[Role], *, whole_pages: int) -> None:
    """What all sources sent is as many bytes as the destination needed: nothing twice, nothing in vain."""
    place = to.coordinates
    for role in {role for role, _ in to.buffers} - skip:
        layers = [buffer for (name, _), buffer in to.buffers.items() if name is role]
        opaque = role in to.shape.formats and to.shape.formats[role].encoding != "plain"
        tokens = whole_pages * to.shape.page_size if opaque else request.tokens
        wanted = sum(
            live_shard(b.tensor, 0, b.layer, tokens, tp=place.tp_size, rank=place.tp_rank).nbytes for b in layers
        )
        sent = sum(nbytes for (_, name), nbytes in moved.nbytes.items() if name is role)
        assert sent == wanted, f"{role}: {sent} bytes were sent, {to.manifest.label} needs {wanted}"


def serve(
    model: Model,
    prefill: tuple[int, Shape],
    decode: tuple[int, Shape],
    request: Request,
    *,
    stages: int = 1,
    dp: tuple[int, int] = (0, 1),
    policy: Policy = STRICT,
    decode_model: Model | None = None,
    rng: int = 7,
    at: Mapping[str, Place] | None = None,
) -> list[Moved]:
    """One request from all ranks of a prefill replica to all ranks of a decode server, each (TP size, pools).

    decode_model: where it differs. at: fixed places of the "prefill" or "decode" ranks instead of random ones.
    """
    random, at = np.random.default_rng(rng), at or {}
    (p, source_shape), (d, destination_shape) = prefill, decode
    sources = prefill_ranks(model, p, source_shape, stages=stages, dp=dp)
    held = (
        [at["prefill"]] * len(sources)
        if "prefill" in at
        else places(random, len(sources), source_shape, request.tokens)
    )
    for source, place in zip(sources, held, strict=True):
        source.write(request.seed, place.pages, place.slot, request.tokens)
    results = []
    for rank in range(d):
        to = decode_rank(decode_model or model, d, rank, destination_shape)
        into = at["decode"] if "decode" in at else places(random, 1, destination_shape, request.tokens)[0]
        results.append(check(sources, held, to=to, into=into, request=request, policy=policy))
    return results
