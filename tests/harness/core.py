"""The core's way of a request, from SGLang's real pools to SGLang's real pools, in one process and without a network.

Describe the live pools, plan, bind, copy what the descriptors say into staging memory, merge from there. What must come
out is the harness's own expectation (oracle.py), as for a real transfer.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.component import Component, Item, Role
from sglang_hetero.layout.geometry import HeadAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.manifest import Coordinates, Manifest
from sglang_hetero.layout.manifest import Side as ManifestSide
from sglang_hetero.layout.pools import describe
from sglang_hetero.layout.wire import decode, encode
from sglang_hetero.merge.assemble import Assembler, pack_pages
from sglang_hetero.reshard import Plan, bind, plan
from sglang_hetero.reshard.bind import Piece, chunk_pages

from . import compare, expectation, oracle, pools, scheduler
from .compare import Difference
from .expectation import Leftovers, Placement
from .geometry import Geometry
from .pools import Pools
from .sides import Request, Shard, Side

STAGING_POISON = 0x5A


class CoreHandover:
    """All ranks of both sides in one process."""

    def __init__(self, shard: Shard, side: Side) -> None:
        self.geometry = shard.geometry
        self.seed = side.shuffle_seed
        scheduler.publish(shard, replace(side, mode="prefill"))

    def run(self, prefill_tp: int, decode_tp: int, requests: Sequence[Request], chunk_tokens: int) -> list[Difference]:
        """Hand the requests over, one after the other, and compare every byte of every decode pool."""
        rng = np.random.default_rng(self.seed)
        sources = [self._rank(prefill_tp, rank, decode_side=False) for rank in range(prefill_tp)]
        targets = [self._rank(decode_tp, rank, decode_side=True) for rank in range(decode_tp)]
        from_places, to_places = self._placements(requests, rng), self._placements(requests, rng)
        for live, poison in ((sources, oracle.SOURCE_POISON), (targets, oracle.DESTINATION_POISON)):
            for rank in live:
                _poison(rank, poison)
        for source in sources:
            _fill(source, from_places)
        manifests = [self._manifest(rank, ManifestSide.PREFILL) for rank in sources]
        found = []
        for target in targets:
            made = plan(manifests, self._manifest(target, ManifestSide.DECODE))
            for here, there in zip(from_places, to_places, strict=True):
                _hand_over(made, here, there, chunk_tokens)
            found += _differences(target, to_places)
        return found

    def _rank(self, tp: int, rank: int, *, decode_side: bool) -> Pools:
        return pools.build(Shard(self.geometry, tp, rank), decode=decode_side)

    def _placements(self, requests: Sequence[Request], rng: np.random.Generator) -> list[Placement]:
        """Scattered pages and slots for each request; 0 is SGLang's padding."""
        geometry = self.geometry
        pages = [int(page) for page in rng.permutation(geometry.pages) + 1]
        slots = [int(slot) for slot in rng.permutation(geometry.slots) + 1]
        placed = []
        for request in requests:
            count = -(-request.tokens // geometry.page_size)
            own, pages = tuple(pages[:count]), pages[count:]
            placed.append(Placement(request.room, request.seed, request.tokens, own, slots.pop(), aux_row=0))
        return placed

    def _manifest(self, rank: Pools, side: ManifestSide) -> Manifest:
        """The rank's own description, as its peer gets it over the wire."""
        described = describe(
            side=side,
            host="harness",
            coordinates=Coordinates(tp_rank=rank.shard.rank, tp_size=rank.shard.tp),
            model=model_geometry(self.geometry),
            fingerprint="harness",
            incarnation="1",
            sglang="0.5.23",
            target_pool=rank.target,
            draft_pool=rank.draft,
            mamba_pool=getattr(rank.requests, "mamba_pool", None),
        )
        return decode(encode(described))


def model_geometry(geometry: Geometry) -> ModelGeometry:
    """The harness's geometry in the core's words."""
    segments = tuple(
        Segment(name, segment.heads, segment.head_width, Sharding.DIVIDED)
        for name, segment in zip("qkv", geometry.conv_segments, strict=True)
    )
    return ModelGeometry(
        attention=HeadAttention(geometry.kv_heads, geometry.head_dim, geometry.head_dim),
        attention_layers=geometry.full_attention_layers,
        linear=LinearAttention(
            conv_segments=segments,
            conv_kernel=geometry.conv_kernel,
            ssm_heads=geometry.linear_value_heads,
            ssm_rows=geometry.linear_value_dim,
            ssm_columns=geometry.linear_key_dim,
        )
        if geometry.linear_layers
        else None,
        linear_layers=geometry.linear_layers,
        draft_layers=geometry.draft_layers,
    )


def _poison(rank: Pools, byte: int) -> None:
    for buffer, view in pools.buffers(rank):
        view[...] = expectation.untouched(buffer, byte)


def _fill(rank: Pools, placements: Sequence[Placement]) -> None:
    """What prefill has left in a rank's pools."""
    page_size = rank.shard.geometry.page_size
    for buffer, view in pools.buffers(rank):
        for placement in placements:
            if buffer.component in expectation.PAGED:
                positions = np.arange(placement.tokens)
                pages = np.asarray(placement.pages)[positions // page_size]
                tokens = expectation.kv(buffer, rank.shard, placement.seed, range(placement.tokens))
                view[pages, positions % page_size] = tokens
            elif buffer.component is not oracle.Component.AUX:
                view[placement.slot] = expectation.state(buffer, rank.shard, placement.seed)


def _hand_over(made: Plan, here: Placement, there: Placement, chunk_tokens: int) -> None:
    """One request into one decode rank: the pieces of all sources, each merged when all its sources have written."""
    destination = made.destination
    memory = {
        (component.role, layer): _memory(component, layer)
        for component in destination.components
        for layer in component.layers
    }
    assembler = Assembler(made, memory)
    chunks = chunk_pages(here.tokens, chunk_tokens, destination.page_size)
    arrived: dict[tuple[Role, int, int], dict[int, Any]] = {}
    sizes: dict[tuple[Role, int, int], Piece] = {}
    for source in range(len(made.sources)):
        bound = bind(made, source, pages=list(here.pages), slot=here.slot, tokens=here.tokens, chunks=chunks)
        for piece in bound.pieces:
            key = (piece.share.role, piece.layer, piece.first_page)
            arrived.setdefault(key, {})[source] = _write(piece, here)
            sizes[key] = piece
    for (role, layer, first), areas in arrived.items():
        piece = sizes[role, layer, first]
        assert set(areas) == set(assembler.sources(role, layer))
        if piece.share.item is Item.PAGE:
            pages = torch.tensor(there.pages[first : first + piece.pages])
            assembler.merge_pages(role, layer, pages, piece.tokens, areas)
        else:
            assembler.merge_slot(role, layer, torch.tensor([there.slot]), areas)


def _write(piece: Piece, here: Placement) -> torch.Tensor:
    """What an engine would do: bytes from the source's memory into the area that the source was given."""
    share, moved = piece.share, piece.descriptors
    area = torch.full((piece.pages * share.staged_bytes,), STAGING_POISON, dtype=torch.uint8)
    start = 0
    if moved.packed:
        gathered = torch.full_like(area, STAGING_POISON)
        pages = torch.tensor(here.pages[piece.first_page : piece.first_page + piece.pages])
        pack_pages(share, _memory(share.source_component, piece.layer), pages, piece.tokens, gathered)
        start = gathered.data_ptr()
    for source, staged, size in zip(moved.source.tolist(), moved.staged.tolist(), moved.sizes.tolist(), strict=True):
        assert staged + size <= len(area)
        ctypes.memmove(area.data_ptr() + staged, start + source, size)
    return area


def _memory(component: Component, layer: int) -> torch.Tensor:
    """The live bytes of a layer's buffer, found by nothing but its description."""
    return torch.frombuffer(
        (ctypes.c_uint8 * component.buffer_span).from_address(component.address(layer)), dtype=torch.uint8
    )


def _differences(rank: Pools, placements: Sequence[Placement]) -> list[Difference]:
    found = []
    for buffer, actual in pools.buffers(rank):
        if buffer.component is oracle.Component.AUX:
            continue
        wanted = expectation.expected(buffer, rank.shard, placements, Leftovers.UNTOUCHED)
        owned = {item for placement in placements for item in placement.items(buffer.component)}
        difference = compare.first_difference(buffer, rank.shard.rank, wanted, actual, owned)
        if difference is not None:
            found.append(difference)
    return found
