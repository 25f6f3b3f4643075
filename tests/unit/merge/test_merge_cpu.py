"""The CPU path against the reference: all bytes of the destination's memory, gaps and neighbours included."""

import itertools
import tracemalloc
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sglang_hetero.merge import cpu, naive, ops
from tests.unit.merge.support import DTYPES, assert_same_bytes, offsets, random_fill, random_tensor, strided

LAYERS = 2
UNLIMITED = 1 << 60
# How the CPU path copies, by its two thresholds (bytes per copy): (small, large).
WAYS = {
    "indexed": (UNLIMITED, UNLIMITED),
    "numpy": (0, UNLIMITED),
    "torch": (0, 0),
    "measured": (cpu._SMALL, cpu._LARGE),
}
WIDTHS = [(2,), (1, 1), (3, 1, 2), (1, 2, 1, 3), (1, 1, 1, 1, 1)]
# Order of the axes in memory and gaps between them.
KV_MEMORY = {
    "dense": {},
    "heads_within_more": {"gaps": {3: 1}},
    "dim_within_more": {"gaps": {4: 3}},
    "heads_outermost": {"order": [3, 0, 1, 2, 4]},
    "pages_outermost": {"order": [1, 0, 2, 3, 4], "gaps": {1: 1}},
    "dim_not_innermost": {"order": [0, 1, 2, 4, 3]},
}
CONV_MEMORY = {"channels_first": {}, "window_first": {"order": [0, 1, 3, 2]}}
SSM_MEMORY = {"dense": {}, "transposed": {"order": [0, 1, 2, 4, 3]}, "padded": {"gaps": {1: 1, 2: 1}}}


def by_id(table):
    return {"argvalues": list(table.values()), "ids": list(table)}


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def widths_id(widths):
    return "heads_" + "_".join(map(str, widths))


@pytest.fixture(params=list(WAYS.values()), ids=list(WAYS))
def way(request, monkeypatch):
    small, large = request.param
    monkeypatch.setattr(cpu, "_SMALL", small)
    monkeypatch.setattr(cpu, "_LARGE", large)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def ids_of(count, items, generator):
    return torch.randperm(items, generator=generator)[:count]


def check(name, memory, view, call):
    """Run `call(function, destination)` with both functions, each on its own copy of the destination's memory."""
    results = []
    for function in (getattr(ops, name), getattr(naive, name)):
        copy = memory.clone()
        offset = view.storage_offset()
        call(function, copy.view(view.dtype).as_strided(view.shape, view.stride(), offset))
        results.append(copy)
    assert_same_bytes(*results)
    assert not torch.equal(results[0], memory), "nothing was written"


def check_kv(generator, *, dtype, widths, n, page, dim, tokens=None, pool_memory=None, shard_memory=None, pages=None):
    """merge_kv, then pack_kv of the second half of the heads."""
    pool_pages = n + 4
    memory, pool = strided((LAYERS, pool_pages, page, sum(widths), dim), dtype, **(pool_memory or {}))
    pages = ids_of(n, pool_pages, generator) if pages is None else pages
    shards = [
        random_tensor((LAYERS, n, page, heads, dim), dtype, generator, **(shard_memory or {})) for heads in widths
    ]
    check("merge_kv", memory, pool, lambda merge, to: merge(to, shards, pages, offsets(widths), tokens))
    random_fill(pool, generator)
    start = sum(widths) // 2
    packed, out = strided((LAYERS, n, page, sum(widths) - start, dim), dtype, **(shard_memory or {}))
    check("pack_kv", packed, out, lambda pack, to: pack(to, pool, pages, start, tokens))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("widths", WIDTHS, ids=widths_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_kv_of_any_dtype_and_number_of_shards(dtype, widths, generator):
    check_kv(generator, dtype=dtype, widths=widths, n=5, page=4, dim=8, tokens=18)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
def test_kv_stops_at_the_last_token(tokens, generator):
    check_kv(generator, dtype=torch.bfloat16, widths=(1, 1), n=-(-tokens // 128), page=128, dim=4, tokens=tokens)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shard_memory", **by_id(KV_MEMORY))
@pytest.mark.parametrize("pool_memory", **by_id(KV_MEMORY))
def test_kv_in_strided_memory(pool_memory, shard_memory, generator):
    check_kv(
        generator,
        dtype=torch.float16,
        widths=(2, 1),
        n=3,
        page=4,
        dim=6,
        tokens=10,
        pool_memory=pool_memory,
        shard_memory=shard_memory,
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "pages",
    [[3], [0, 1, 2, 3], [3, 2, 1, 0], [5, 6, 0, 1, 2, 7], [0, 2, 4], [4, 5, 6]],
    ids=lambda pages: f"pages{pages}",
)
@pytest.mark.parametrize("page", [1, 4])
def test_kv_with_runs_of_pages(page, pages, generator):
    check_kv(generator, dtype=torch.bfloat16, widths=(1, 2), n=len(pages), page=page, dim=3, pages=torch.tensor(pages))


def test_kv_writes_only_the_heads_of_its_shards(generator):
    memory, pool = strided((LAYERS, 3, 4, 6, 2), torch.int8)
    shards = [random_tensor((LAYERS, 2, 4, heads, 2), torch.int8, generator) for heads in (1, 2)]
    check("merge_kv", memory, pool, lambda merge, to: merge(to, shards, torch.tensor([2, 0]), [4, 1]))


def conv_blocks(parts, replicated=()):
    """Channels of each rank and segment -> blocks; of a replicated segment the first rank is the writer.

    parts[rank][segment]: channels.
    """
    blocks = [[] for _ in parts]
    destination = 0
    for segment in range(len(parts[0])):
        for rank, own in enumerate(parts):
            if segment in replicated and rank:
                continue
            blocks[rank].append((sum(own[:segment]), destination, own[segment]))
            destination += own[segment]
    return blocks, destination


CONV_PARTS = {
    "one_shard": ([[4, 4, 8]], ()),
    "equal_segments": ([[4, 4, 4], [4, 4, 4]], ()),
    "wider_v": ([[8, 8, 16], [8, 8, 16]], ()),
    "unequal_ranks": ([[3, 3, 6], [1, 1, 2], [2, 2, 4]], ()),
    "replicated_k_v": ([[8, 4, 4], [8, 4, 4]], (1, 2)),
    "five_shards": ([[1, 1, 3]] * 5, ()),
    "five_equal_segments": ([[2, 2, 2, 2, 2]] * 2, ()),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shard_memory", **by_id(CONV_MEMORY))
@pytest.mark.parametrize("pool_memory", **by_id(CONV_MEMORY))
@pytest.mark.parametrize("parts, replicated", **by_id(CONV_PARTS))
def test_conv_in_both_layouts(parts, replicated, pool_memory, shard_memory, generator):
    blocks, channels = conv_blocks(parts, replicated)
    memory, pool = strided((LAYERS, 6, channels, 3), torch.bfloat16, **pool_memory)
    shards = [random_tensor((LAYERS, 4, sum(own), 3), torch.bfloat16, generator, **shard_memory) for own in parts]
    slots = torch.tensor([4, 5, 0, 2])
    check("reorder_conv", memory, pool, lambda reorder, to: reorder(to, shards, slots, blocks))


CONV_BLOCKS = {
    "descending": [(4, 8, 2), (2, 4, 2), (0, 0, 2)],
    "source_descending": [(4, 0, 2), (2, 4, 2), (0, 8, 2)],
    "same_source": [(2, 0, 2), (2, 4, 2), (2, 8, 2)],
    "two_series": [(0, 0, 1), (1, 2, 1), (2, 4, 1), (4, 5, 2), (3, 7, 2)],
    "none": [],
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("blocks", **by_id(CONV_BLOCKS))
def test_conv_blocks_in_any_order_and_distance(blocks, generator):
    memory, pool = strided((LAYERS, 5, 12, 3), torch.int8)
    shards = [random_tensor((LAYERS, 3, channels, 3), torch.int8, generator) for channels in (6, 2)]
    slots = torch.tensor([4, 0, 1])
    check("reorder_conv", memory, pool, lambda reorder, to: reorder(to, shards, slots, [blocks, [(0, 10, 2)]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("memory_of", **by_id(CONV_MEMORY))
def test_conv_leaves_dead_window_rows_and_other_slots(memory_of, dtype, generator):
    # The pool keeps six inputs, the last three of them live, as with four draft tokens on NPU.
    blocks, channels = conv_blocks([[2, 2, 4], [2, 2, 4]])
    memory, pool = strided((LAYERS, 3, channels, 6), dtype, **memory_of)
    shards = [random_tensor((LAYERS, 1, 8, 3), dtype, generator, **memory_of) for _ in range(2)]
    check("reorder_conv", memory, pool[..., -3:], lambda reorder, to: reorder(to, shards, torch.tensor([1]), blocks))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("memory_of", **by_id(SSM_MEMORY))
@pytest.mark.parametrize("widths", WIDTHS, ids=widths_id)
def test_ssm_into_the_first_checkpoint(widths, memory_of, stride, generator):
    slots = torch.tensor([3, 0, 1])
    memory, pool = strided((LAYERS, 4 * stride, sum(widths), 4, 2), torch.float32, **memory_of)
    shards = [random_tensor((LAYERS, 3, heads, 4, 2), torch.float32, generator) for heads in widths]
    check("scatter_ssm", memory, pool, lambda scatter, to: scatter(to, shards, slots, offsets(widths), stride))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_ssm_of_any_dtype(dtype, generator):
    memory, pool = strided((LAYERS, 5, 3, 2, 4), dtype)
    shards = [random_tensor((LAYERS, 2, heads, 2, 4), dtype, generator) for heads in (1, 2)]
    check("scatter_ssm", memory, pool, lambda scatter, to: scatter(to, shards, torch.tensor([4, 1]), [0, 1]))


@pytest.mark.usefixtures("way")
def test_nan_payloads_and_negative_zeros_survive():
    # Signalling and quiet NaNs of both signs, negative zero, the smallest denormal.
    bits = torch.tensor([0x7F800001, 0x7FC12345, -1, -0x7FFFFF, -0x80000000, 1], dtype=torch.int32)
    pool = torch.zeros(1, 3, 1, 1, 6)
    ops.merge_kv(pool, [bits.view(torch.float32).expand(1, 2, 1, 1, 6)], torch.tensor([2, 0]), [0])
    assert pool.view(torch.int32)[0, [2, 0], 0, 0].tolist() == [bits.tolist()] * 2
    assert not pool[0, 1].any()


# An item of 1 MiB, at a place beyond 2^32 bytes and, where it is not the same, beyond 2^32 elements.
ITEM = 1 << 20
FAR = (1 << 32) // ITEM + 1


def far_kv(pool, shard, ids):
    ops.merge_kv(pool.view(1, -1, 64, 2, ITEM // 128), [shard.view(1, 1, 64, 2, ITEM // 128)], ids, [0])


def far_conv(pool, shard, ids):
    ops.reorder_conv(pool.view(1, -1, ITEM // 4, 4), [shard.view(1, 1, ITEM // 4, 4)], ids, [[(0, 0, ITEM // 4)]])


def far_ssm(pool, shard, ids):
    ops.scatter_ssm(pool.view(1, -1, 16, 256, 256), [shard.view(1, 1, 16, 256, 256)], ids // 3, [0], 3)


@pytest.mark.parametrize("write", [far_kv, far_conv, far_ssm])
def test_writes_beyond_4_gib(write, generator):
    """Nothing but the written item and its neighbours is ever touched, so the memory is only reserved."""
    far = FAR + (-FAR) % 3  # a first checkpoint
    pool = torch.empty(far + 2, ITEM, dtype=torch.int8)
    around = pool[far - 1 :]
    around.fill_(-1)
    shard = random_tensor((ITEM,), torch.int8, generator)
    write(pool, shard, torch.tensor([far]))
    assert torch.equal(pool[far], shard)
    assert around[[0, 2]].eq(-1).all()
    wrapped = [far * ITEM % 2**32 // ITEM, far * ITEM % 2**31 // ITEM]
    assert not pool[wrapped].any(), "a byte went where a 32-bit offset would have put it"


def test_packs_from_beyond_4_gib(generator):
    pool = torch.empty(1, FAR + 1, 64, 2, ITEM // 128, dtype=torch.int8)
    random_fill(pool[:, FAR:], generator)
    out = torch.zeros(1, 1, 64, 1, ITEM // 128, dtype=torch.int8)
    ops.pack_kv(out, pool, torch.tensor([FAR]), 1)
    assert torch.equal(out[0, 0], pool[0, FAR, :, 1:])


def calls():
    """Every operation on 1 MiB and more, in a scattered and a contiguous placement."""
    page_ids = {"contiguous": torch.arange(16), "scattered": torch.arange(16) * 2}
    for placement, ids in page_ids.items():
        pool = torch.zeros(LAYERS, 32, 64, 2, 256, dtype=torch.bfloat16)
        half = torch.ones(LAYERS, 16, 64, 1, 256, dtype=torch.bfloat16)
        yield f"merge_kv-{placement}", partial(ops.merge_kv, pool, [half, half], ids, [0, 1], 1000)
        yield f"pack_kv-{placement}", partial(ops.pack_kv, half, pool, ids, 1, 1000)
        conv = torch.zeros(LAYERS, 32, 3, 6144, dtype=torch.bfloat16)
        part = torch.ones(LAYERS, 16, 3, 3072, dtype=torch.bfloat16)
        blocks, _ = conv_blocks([[1024] * 3] * 2)
        part = part.transpose(2, 3)
        for name, to in (("channels_first", conv.view(LAYERS, 32, 6144, 3)), ("window_first", conv.transpose(2, 3))):
            run = partial(ops.reorder_conv, to, [part, part], ids, blocks)
            yield f"reorder_conv-{name}-{placement}", run
        states = torch.zeros(LAYERS, 32, 4, 64, 64)
        heads = torch.ones(LAYERS, 16, 2, 64, 64)
        yield f"scatter_ssm-{placement}", partial(ops.scatter_ssm, states, [heads, heads], ids, [0, 2])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("call", **by_id(dict(calls())))
def test_allocates_no_data(call):
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert [event.name for event in profiler.events() if event.cpu_memory_usage > 0] == []
    tracemalloc.start()  # numpy's memory
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


def test_shards_may_come_in_any_order(generator):
    widths = (1, 2, 3)
    shards = [random_tensor((1, 2, 2, heads, 2), torch.int8, generator) for heads in widths]
    results = []
    for order in itertools.permutations(range(3)):
        pool = torch.zeros(1, 3, 2, 6, 2, dtype=torch.int8)
        ops.merge_kv(pool, [shards[i] for i in order], torch.tensor([1, 2]), [offsets(widths)[i] for i in order])
        results.append(pool)
    assert all(torch.equal(results[0], other) for other in results[1:])
