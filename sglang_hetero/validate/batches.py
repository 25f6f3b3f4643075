"""Cases of the stage `kernels`: what a transfer calls, which has a kernel of its own (merge/triton_batch.py).

A decode rank merges all pieces that are ready in one call, attention KV, conv windows and SSM states, out of staging;
and it empties the pages of draft caches that nobody sends. What must come of it is written here once more, from what
the tensors mean and without a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang_hetero.layout.axes import Segment, Sharding
from sglang_hetero.layout.component import Item, Role
from sglang_hetero.layout.geometry import HeadAttention, LinearAttention, ModelGeometry
from sglang_hetero.layout.manifest import Coordinates, Manifest, Side
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.merge import naive
from sglang_hetero.merge.assemble import Assembler
from sglang_hetero.merge.batch import Staged
from sglang_hetero.reshard.plan import Plan, plan

from .cases import CHANNELS, DIM, HEADS, PAGE, ROWS, SHARDS, SSM_DIM, SSM_HEADS, WINDOW, Case, bits, ids_of, poisoned

ALIGN = 512
"""Bytes: buffers of pools and areas of staging begin at multiples, as allocators and staging have it."""
BITS = {"bfloat16": torch.int16, "float32": torch.int32}
"""Elements are moved as integers, so that no NaN changes."""
SLOT = 2
"""The request's, of a pool of three beside the padding."""
SLOTS = 3


@dataclass(frozen=True)
class _Entry:
    """One layer of one role. start: byte of its buffer in the pool. shape: of that. areas: per source the byte of the
    arena at which its part begins; none where nobody sends it."""

    role: Role
    item: Item
    layer: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    areas: tuple[int, ...] = ()

    def inside(self, memory: torch.Tensor, start: int, *shape: int) -> torch.Tensor:
        """Elements of this dtype from a byte of a row of uint8 on."""
        nbytes = math.prod(shape) * self.dtype.itemsize
        return memory[start : start + nbytes].view(self.dtype).view(shape)

    def buffer(self, pool: torch.Tensor) -> torch.Tensor:
        """Its buffer: [items, ...]."""
        return self.inside(pool, self.start, *self.shape)


def merge_batch(layout: ConvLayout, layers: int, pages: int, generator: torch.Generator) -> Case:
    """All of one request in one call: a page that is not full, scattered pages, one slot."""
    model = _model(max(1, layers // 2), drafts=1)
    made, options = _planned(model, layout, pages, draft=True)
    entries, pool_bytes, arena_bytes = _laid_out(made, layout, options, pages)
    ids, tokens = ids_of(pages, generator), pages * PAGE - PAGE // 2
    staged = [
        Staged(
            one.role,
            one.layer,
            (ids if one.item is Item.PAGE else torch.tensor([SLOT])).numpy(),
            tokens,
            dict(enumerate(one.areas)),
        )
        for one in entries
    ]
    define = partial(_merged, entries, ids.tolist(), tokens)
    run = _Call(made, entries, lambda to, tensors: to.merge_batch(tensors[1], staged), define)
    pool = poisoned(pool_bytes, dtype=torch.uint8)
    return Case((pool, bits(generator, arena_bytes, dtype=torch.uint8)), 0, run, arena_bytes)


def begin_empty(layers: int, pages: int, generator: torch.Generator) -> Case:
    """Draft caches of a request whose prefill has none."""
    made, options = _planned(_model(1, drafts=layers), ConvLayout.CHANNELS_FIRST, pages, draft=False)
    entries, pool_bytes, _ = _laid_out(made, ConvLayout.CHANNELS_FIRST, options, pages)
    ids = ids_of(pages, generator)
    run = _Call(made, entries, lambda to, _: to.begin_empty(ids.numpy()), partial(_emptied, made.missing, entries, ids))
    empty = sum(math.prod(one.shape[1:]) * one.dtype.itemsize for one in entries if one.role in made.missing)
    return Case((bits(generator, pool_bytes, dtype=torch.uint8),), 0, run, empty * pages)


class _Call:
    """A case's `run`: with `naive` what must come of it, else the product. An assembler is made once for its pool."""

    def __init__(
        self,
        made: Plan,
        entries: Sequence[_Entry],
        product: Callable[[Assembler, Sequence[torch.Tensor]], None],
        define: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self._plan, self._entries, self._product, self._define = made, entries, product, define
        self._pool: torch.Tensor | None = None
        self._assembler: Assembler | None = None

    def __call__(self, module: object, tensors: Sequence[torch.Tensor]) -> None:
        if module is naive:
            self._define(tensors)
            return
        pool = tensors[0]
        if self._assembler is None or self._pool is not pool:
            memory = {
                (one.role, one.layer): pool[one.start :][: math.prod(one.shape) * one.dtype.itemsize]
                for one in self._entries
            }
            self._pool, self._assembler = pool, Assembler(self._plan, memory)
        self._product(self._assembler, tensors)


def _merged(entries: Iterable[_Entry], pages: Sequence[int], tokens: int, tensors: Sequence[torch.Tensor]) -> None:
    """Every source's heads, or its parts of q, k and v, beside each other; rows behind the last token stay."""
    pool, arena = tensors
    for one in entries:
        buffer = one.buffer(pool)
        for source, area in enumerate(one.areas):
            if one.role is Role.CONV:
                _conv(one, buffer[SLOT], arena, source, area)
            elif one.role is Role.SSM:
                share = SSM_HEADS // SHARDS
                own = one.inside(arena, area, share, SSM_DIM, SSM_DIM)
                buffer[SLOT, source * share : (source + 1) * share] = own
            else:
                share = HEADS // SHARDS
                sent = one.inside(arena, area, len(pages), PAGE, share, DIM)
                for place, page in enumerate(pages):
                    live = min(PAGE, tokens - place * PAGE)
                    buffer[page, :live, source * share : (source + 1) * share] = sent[place, :live]


def _conv(one: _Entry, slot: torch.Tensor, arena: torch.Tensor, source: int, area: int) -> None:
    share = CHANNELS // SHARDS
    window_first = slot.shape[0] == ROWS
    sent = one.inside(arena, area, *((WINDOW, 3 * share) if window_first else (3 * share, WINDOW)))
    for part in range(3):
        to = slice(part * CHANNELS + source * share, part * CHANNELS + (source + 1) * share)
        own = slice(part * share, (part + 1) * share)
        if window_first:
            slot[ROWS - WINDOW :, to] = sent[:, own]
        else:
            slot[to] = sent[own]


def _emptied(
    missing: frozenset[Role], entries: Iterable[_Entry], pages: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> None:
    for one in entries:
        if one.role in missing:
            one.buffer(tensors[0])[pages] = 0


def _model(layers: int, drafts: int) -> ModelGeometry:
    """So many attention layers, linear layers and draft layers of the size of Qwen3.5-2B's."""
    segments = tuple(Segment(name, SSM_HEADS, CHANNELS // SSM_HEADS, Sharding.DIVIDED) for name in "qkv")
    return ModelGeometry(
        HeadAttention(HEADS, DIM, DIM),
        tuple(range(layers)),
        LinearAttention(segments, WINDOW + 1, SSM_HEADS, SSM_DIM, SSM_DIM),
        tuple(range(layers, 2 * layers)),
        draft_layers=tuple(range(drafts)),
    )


def _planned(model: ModelGeometry, layout: ConvLayout, pages: int, *, draft: bool) -> tuple[Plan, PoolOptions]:
    """SHARDS prefill ranks to one decode rank. draft: whether prefill has one, too."""
    rows = ROWS - WINDOW if layout is ConvLayout.WINDOW_FIRST else 0
    options = PoolOptions(page_size=PAGE, pages=2 * pages, slots=SLOTS, conv_layout=layout, draft_rows=rows)

    def rank(side: Side, number: int, size: int, *, draft: bool) -> Manifest:
        return manifest(model, side, Coordinates(tp_rank=number, tp_size=size), options, draft=draft)

    sources = [rank(Side.PREFILL, number, SHARDS, draft=draft) for number in range(SHARDS)]
    return plan(sources, rank(Side.DECODE, 0, 1, draft=True)), options


def _laid_out(made: Plan, layout: ConvLayout, options: PoolOptions, pages: int) -> tuple[list[_Entry], int, int]:
    """Where each layer's buffer lies in the pool and its parts in the arena; bytes of both."""
    items = {Item.PAGE: options.pages + 1, Item.SLOT: options.slots + 1}
    conv = (ROWS, 3 * CHANNELS) if layout is ConvLayout.WINDOW_FIRST else (3 * CHANNELS, WINDOW)
    shapes = {Role.CONV: conv, Role.SSM: (SSM_HEADS, SSM_DIM, SSM_DIM)}
    entries, start, area = [], 0, 0
    for component in made.destination.components:
        shape = (items[component.item], *shapes.get(component.role, (PAGE, HEADS, DIM)))
        dtype = BITS[component.dtype]
        sent = math.prod((WINDOW, 3 * CHANNELS) if component.role is Role.CONV else shape[1:]) * dtype.itemsize
        sent = sent * (pages if component.item is Item.PAGE else 1) // SHARDS
        for layer in component.layers:
            moved = component.role not in made.missing
            areas = tuple(area + source * _aligned(sent) for source in range(SHARDS)) if moved else ()
            entries.append(_Entry(component.role, component.item, layer, start, shape, dtype, areas))
            start += _aligned(math.prod(shape) * dtype.itemsize)
            area += len(areas) * _aligned(sent)
    return entries, start, area


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
