"""Speed of the merge operations on one CPU thread, beside a memcpy of the same bytes in the same run.

    python -m bench_serving.merge
    python -m bench_serving.merge --repeats 30 --layout window-first --json out/merge.json
    python -m bench_serving.merge --page 1

Geometry of Qwen3.5-2B, sent by two prefill ranks to one decode rank: 18,688 tokens of KV (K and V of 6 full-attention
layers and the draft layer), and the conv windows and SSM states of 18 linear layers. GB/s are 1e9 bytes written per
second. The memcpy is one torch copy_ between two contiguous buffers; beside batches of pieces it copies the same units
of the same staging arena, one after the other, to contiguous memory. Operation and memcpy run in turn, each on buffers
of its own that have been touched before, so both find the caches as the other left them, and noise of the machine hits
both; the ratio is the median over these turns of memcpy seconds / operation seconds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from sglang_hetero.launcher import flags
from sglang_hetero.layout import Coordinates, Item, ModelGeometry, Role, Segment, Sharding, Side
from sglang_hetero.layout.geometry import HeadAttention, LinearAttention
from sglang_hetero.layout.synthetic import PoolOptions, manifest
from sglang_hetero.layout.window import ConvLayout
from sglang_hetero.merge import Assembler, ops
from sglang_hetero.merge.batch import Staged
from sglang_hetero.reshard import plan
from sglang_hetero.transfer.merger import MAX_BATCH

REPEATS = 15
SHARDS = 2
TOKENS = 146 * 128
PAGE = 128
KV_ENTRIES = 2 * (6 + 1)  # K and V of the full-attention layers and of the draft layer
KV_HEADS, KV_DIM = 2, 256
LINEAR_LAYERS = 18
SEGMENT = 16 * 128  # channels of each of q, k and v
SEGMENTS = 3
WINDOW = 3
SSM_HEADS, SSM_DIM = 16, 128
# (requests at once, placement of their slots)
STATE_CASES = [(1, "contiguous"), (8, "contiguous"), (8, "scattered")]
# A pool has so many times the pages or slots in use, so that scattered ones are apart.
SPARE = 2
LAYOUTS = ["channels-first", "window-first"]
# Staging as a decode rank has it: units of 2 MiB, of which each source has an equal part, 16 of them for a request.
UNIT_BYTES = 2 << 20
UNITS = 16
SEED = 7


@dataclass
class Case:
    """One row: what runs, on how many pages or slots, the bytes that it writes; the memcpy, if it is a special one."""

    operation: str
    placement: str
    items: int
    bytes: int
    run: Callable[[], None]
    memcpy: Callable[[], object] | None = None


@dataclass
class Result:
    """GB/s are 1e9 bytes written per second, each by its median time; ratio is the median of the turns' ratios."""

    operation: str
    placement: str
    items: int
    bytes: int
    gb_per_s: float
    memcpy_gb_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def ids(count: int, placement: str) -> torch.Tensor:
    """Distinct pages or slots of a pool of SPARE * count + 1, the first left out, as it is in SGLang's pools."""
    if placement == "contiguous":
        return torch.arange(1, count + 1)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randperm(SPARE * count, generator=generator)[:count] + 1


def pool_of(layers: int, count: int, *item: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(layers, SPARE * count + 1, *item, dtype=dtype)


def kv_cases(page: int) -> Iterator[Case]:
    n = -(-TOKENS // page)
    heads = KV_HEADS // SHARDS
    pool = pool_of(KV_ENTRIES, n, page, KV_HEADS, KV_DIM, dtype=torch.bfloat16)
    shards = [torch.ones(KV_ENTRIES, n, page, heads, KV_DIM, dtype=pool.dtype) for _ in range(SHARDS)]
    offsets = [heads * rank for rank in range(SHARDS)]
    size = sum(shard.nbytes for shard in shards)
    by_entry = [(pool[e : e + 1], [shard[e : e + 1] for shard in shards]) for e in range(KV_ENTRIES)]

    def merge_by_layer(pages: torch.Tensor) -> None:
        for one, own in by_entry:
            ops.merge_kv(one, own, pages, offsets)

    for placement in ("contiguous", "scattered"):
        pages = ids(n, placement)
        yield Case("merge_kv", placement, n, size, partial(ops.merge_kv, pool, shards, pages, offsets))
        yield Case("merge_kv, a call per layer", placement, n, size, partial(merge_by_layer, pages))
        yield Case("pack_kv", placement, n, shards[0].nbytes, partial(ops.pack_kv, shards[0], pool, pages, offsets[-1]))


def conv_windows(layers: int, items: int, channels: int, layout: str, fill: int) -> torch.Tensor:
    """[layers, items, channels, window], in memory as `layout` says."""
    if layout == "window-first":
        return torch.full((layers, items, WINDOW, channels), fill, dtype=torch.bfloat16).transpose(2, 3)
    return torch.full((layers, items, channels, WINDOW), fill, dtype=torch.bfloat16)


def conv_cases(layout: str) -> Iterator[Case]:
    share = SEGMENT // SHARDS
    blocks = [
        [(segment * share, segment * SEGMENT + rank * share, share) for segment in range(SEGMENTS)]
        for rank in range(SHARDS)
    ]
    for n, placement in STATE_CASES:
        pool = conv_windows(LINEAR_LAYERS, SPARE * n + 1, SEGMENTS * SEGMENT, layout, 0)
        shards = [conv_windows(LINEAR_LAYERS, n, SEGMENTS * share, layout, 1) for _ in range(SHARDS)]

        run = partial(ops.reorder_conv, pool, shards, ids(n, placement), blocks)
        yield Case(f"reorder_conv {layout}", placement, n, sum(shard.nbytes for shard in shards), run)


def ssm_cases() -> Iterator[Case]:
    heads = SSM_HEADS // SHARDS
    offsets = [heads * rank for rank in range(SHARDS)]
    for n, placement in STATE_CASES:
        pool = pool_of(LINEAR_LAYERS, n, SSM_HEADS, SSM_DIM, SSM_DIM, dtype=torch.float32)
        shards = [torch.ones(LINEAR_LAYERS, n, heads, SSM_DIM, SSM_DIM) for _ in range(SHARDS)]

        run = partial(ops.scatter_ssm, pool, shards, ids(n, placement), offsets)
        yield Case("scatter_ssm", placement, n, sum(shard.nbytes for shard in shards), run)


def geometry() -> ModelGeometry:
    """The model's caches; layers of each kind are numbered from 0, which only has to be a layer of one kind each."""
    attention = KV_ENTRIES // 2 - 1
    segments = tuple(Segment(name, SSM_HEADS, SEGMENT // SSM_HEADS, Sharding.DIVIDED) for name in "qkv")
    return ModelGeometry(
        HeadAttention(KV_HEADS, KV_DIM, KV_DIM),
        tuple(range(attention)),
        LinearAttention(segments, WINDOW + 1, SSM_HEADS, SSM_DIM, SSM_DIM),
        tuple(range(attention, attention + LINEAR_LAYERS)),
        draft_layers=(0,),
    )


def batch_cases(layout: str, page: int) -> Iterator[Case]:
    """What a decode rank does: pieces of a unit each, out of a window of units that are used again and again."""
    n = -(-TOKENS // page)
    options = PoolOptions(page_size=page, pages=SPARE * n, conv_layout=ConvLayout(layout.replace("-", "_")))
    sources = [
        manifest(geometry(), Side.PREFILL, Coordinates(tp_rank=rank, tp_size=SHARDS), options) for rank in range(SHARDS)
    ]
    made = plan(sources, manifest(geometry(), Side.DECODE, Coordinates(), options))
    memory = {
        (part.role, layer): torch.zeros(part.buffer_span, dtype=torch.uint8)
        for part in made.destination.components
        for layer in part.layers
    }
    assembler, arena = Assembler(made, memory), torch.ones(UNITS * UNIT_BYTES, dtype=torch.uint8)
    area = UNIT_BYTES // SHARDS
    shares = {(share.role, layer): share for share in made.shares for layer in share.layers}

    def staged(role: Role, layer: int, unit: int, own: torch.Tensor, offset: int = 0) -> Staged:
        start = unit % UNITS * UNIT_BYTES + offset
        areas = {source: start + source * area for source in range(SHARDS)}
        return Staged(role, layer, own.numpy(), len(own) * page, areas)

    def merge(pieces: list[Staged], at_once: int) -> None:
        for start in range(0, len(pieces), at_once):
            assembler.merge_batch(arena, pieces[start : start + at_once])

    def one_by_one(pieces: list[Staged]) -> None:
        for piece in pieces:
            share = shares[piece.role, piece.layer]
            room = len(piece.ids) * share.staged_bytes
            views = {source: arena[start : start + room] for source, start in piece.areas.items()}
            own = torch.from_numpy(piece.ids)
            if share.item is Item.PAGE:
                assembler.merge_pages(piece.role, piece.layer, own, piece.tokens, views)
            else:
                assembler.merge_slot(piece.role, piece.layer, own, views)

    def size_of(pieces: list[Staged]) -> list[int]:
        return [SHARDS * len(piece.ids) * shares[piece.role, piece.layer].staged_bytes for piece in pieces]

    def case(name: str, placement: str, items: int, pieces: list[Staged], run: Callable[[], None]) -> Case:
        sizes = size_of(pieces)
        target = torch.zeros(sum(sizes), dtype=torch.uint8)

        def memcpy() -> None:
            end = 0
            for piece, size in zip(pieces, sizes, strict=True):
                start = min(piece.areas.values()) // UNIT_BYTES * UNIT_BYTES
                target[end : end + size].copy_(arena[start : start + size])
                end += size

        return Case(name, placement, items, sum(sizes), run, memcpy)

    paged = [key for key, share in shares.items() if share.item is Item.PAGE]
    for placement in ("contiguous", "scattered"):
        pages, pieces = ids(n, placement), []
        for role, layer in paged:
            most = max(1, area // shares[role, layer].staged_bytes)
            pieces += [staged(role, layer, len(pieces) + unit, own) for unit, own in enumerate(pages.split(most))]
        yield case("merge_batch KV", placement, n, pieces, partial(merge, pieces, MAX_BATCH))
        yield case("merge_pages, a call per piece", placement, n, pieces, partial(one_by_one, pieces))
    state = []
    for unit, layer in enumerate(geometry().linear_layers):
        state += [
            staged(Role.CONV, layer, unit, ids(1, "contiguous")),
            staged(Role.SSM, layer, unit, ids(1, "contiguous"), offset=shares[Role.CONV, layer].staged_bytes),
        ]
    yield case("merge_batch conv and SSM", "contiguous", 1, state, partial(merge, state, len(state)))
    yield case("merge_slot, a call per piece", "contiguous", 1, state, partial(one_by_one, state))
    conv = [piece for piece in state if piece.role is Role.CONV]
    yield case("merge_batch conv alone", "contiguous", 1, conv, partial(merge, conv, len(conv)))


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(case: Case, repeats: int) -> Result:
    copy = case.memcpy
    if copy is None:
        source = torch.ones(case.bytes, dtype=torch.uint8)
        target = torch.zeros(case.bytes, dtype=torch.uint8)
        copy = partial(target.copy_, source)
    copy()
    case.run()  # the first touch of the pages in use
    turns = [(seconds(copy), seconds(case.run)) for _ in range(repeats)]
    ratios = [memcpy / operation for memcpy, operation in turns]
    memcpy, operation = (statistics.median(column) for column in zip(*turns, strict=True))
    return Result(
        operation=case.operation,
        placement=case.placement,
        items=case.items,
        bytes=case.bytes,
        gb_per_s=round(case.bytes / operation / 1e9, 2),
        memcpy_gb_per_s=round(case.bytes / memcpy / 1e9, 2),
        ratio=round(statistics.median(ratios), 3),
        ratio_min=round(min(ratios), 3),
        ratio_max=round(max(ratios), 3),
    )


def cases(layout: str, page: int) -> Iterator[Case]:
    yield from kv_cases(page)
    yield from conv_cases(layout)
    yield from ssm_cases()
    yield from batch_cases(layout, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=flags.positive, default=REPEATS, help=f"turns per row (default: {REPEATS})")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of the conv windows, on both sides")
    parser.add_argument("--page", type=flags.positive, default=PAGE, help=f"tokens per page (default: {PAGE})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for case in cases(arguments.layout, arguments.page):
        print(f"{case.operation}, {case.placement}, {case.items} items", file=sys.stderr, flush=True)
        results.append(measure(case, arguments.repeats))
    machine = {"cpus": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(f"{machine['threads']} thread, torch {machine['torch']}, {arguments.repeats} turns, page {arguments.page}")
    print("operation                      placement    items       MB    GB/s  memcpy  ratio  min..max")
    for row in results:
        print(
            f"{row.operation:30} {row.placement:11} {row.items:6} {row.bytes / 1e6:8.1f} {row.gb_per_s:7.2f}"
            f" {row.memcpy_gb_per_s:7.2f} {row.ratio:6.2f}  {row.ratio_min:.2f}..{row.ratio_max:.2f}"
        )
    if arguments.json:
        figures = {
            "machine": machine,
            "repeats": arguments.repeats,
            "page": arguments.page,
            "results": [asdict(row) for row in results],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
