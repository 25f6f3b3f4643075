"""The Triton launchers and their kernel, run by Triton's interpreter on CPU tensors.

Every test fills the whole memory of the destination with 0xFF, lets the launcher and the naive loops write into a copy
each, and compares all bytes: neighbours, gaps and padding too.
"""

import itertools
import mmap
from pathlib import Path

import pytest
import torch
import triton
from support import interpreted_kernels
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction

from sglang_hetero.errors import MergeError
from sglang_hetero.merge import chip, naive, triton_kernels, triton_ops
from sglang_hetero.merge.checks import bit_view

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32]
POISON = 0xFF
TILE = chip.INTERPRETER.tile_bytes
MAP_NORESERVE = 0x4000  # Linux; Python has no name for it


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(triton_ops, "triton_kernels", interpreted_kernels())


def random_bits(shape, dtype):
    """A tensor of random bytes, NaNs of every kind among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def poisoned(shape, dtype, order=None, gap=0, pitch=None):
    """A tensor full of 0xFF with its axes laid out in `order`, the slowest first.

    The stride of the axis `pitch`, by default the last but one in order, is `gap` elements longer than it need be.
    """
    order = list(order or range(len(shape)))
    pitch = order[-2] if pitch is None else pitch
    strides, stride = [0] * len(shape), 1
    for axis in reversed(order):
        stride += gap if axis == pitch else 0
        strides[axis] = stride
        stride *= shape[axis]
    memory = torch.full((stride * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype)
    return memory.as_strided(shape, strides)


def like_layout(values, order=None, gap=0, pitch=None):
    """These values in a tensor that is laid out as poisoned() does it."""
    tensor = poisoned(values.shape, values.dtype, order, gap, pitch)
    bit_view(tensor).copy_(bit_view(values))
    return tensor


def memory(tensor):
    """All bytes of the tensor's storage."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def twin(tensor):
    """A copy of the tensor with all of its memory, gaps included."""
    copy = memory(tensor).clone().view(tensor.dtype)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check_same_memory(got, expected):
    differs = (memory(got) != memory(expected)).nonzero()
    assert not len(differs), f"{len(differs)} bytes differ, the first at {differs[0].item()}"


def ids(count, limit):
    return torch.randperm(limit)[:count].to(torch.int64)


def offsets(widths, first=1):
    return list(itertools.accumulate(widths, initial=first))[:-1]


# --- KV pages ----------------------------------------------------------------------------------------------------

KV_LAYOUTS = {
    "layer by layer": {},
    "layers inside a token": {"order": (1, 2, 0, 3, 4)},
    "tokens with a gap": {"gap": 5, "pitch": 2},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", KV_LAYOUTS.values(), ids=KV_LAYOUTS)
@pytest.mark.parametrize("widths", [[2], [1, 3], [2, 1, 1], [1, 1, 2, 3]], ids=str)
def test_merge_kv_writes_the_shards_and_nothing_else(dtype, layout, widths):
    layers, page, dim, n = 2, 8, 24, 3
    pool = poisoned((layers, 7, page, sum(widths) + 2, dim), dtype, **layout)
    shards = [random_bits((layers, n, page, heads, dim), dtype) for heads in widths]
    pages, starts, tokens = ids(n, 7), offsets(widths), 2 * page + 3
    expected = twin(pool)
    naive.merge_kv(expected, shards, pages, starts, tokens)
    triton_ops.merge_kv(pool, shards, pages, starts, tokens)
    check_same_memory(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", KV_LAYOUTS.values(), ids=KV_LAYOUTS)
@pytest.mark.parametrize("tokens", [None, 17, 24], ids=str)
def test_pack_kv_gathers_the_heads_and_nothing_else(dtype, layout, tokens):
    layers, page, heads, dim, n = 2, 8, 2, 24, 3
    pool = like_layout(random_bits((layers, 7, page, 5, dim), dtype), **layout)
    out = poisoned((layers, n, page, heads, dim), dtype, gap=2, pitch=2)
    pages = ids(n, 7)
    expected = twin(out)
    naive.pack_kv(expected, pool, pages, 2, tokens)
    triton_ops.pack_kv(out, pool, pages, 2, tokens)
    check_same_memory(out, expected)


@pytest.mark.parametrize("tokens", [1, 128, 129, 200, 255, 256])
def test_a_last_page_ends_in_any_tile(tokens):
    """Pages of several row blocks: 128 tokens of 2 KiB are 8 tiles of 16 rows."""
    n = -(-tokens // 128)
    pool = poisoned((1, 3, 128, 4, 256), torch.bfloat16)
    shard = random_bits((1, n, 128, 4, 256), torch.bfloat16)
    pages = ids(n, 3)
    expected = twin(pool)
    naive.merge_kv(expected, [shard], pages, [0], tokens)
    triton_ops.merge_kv(pool, [shard], pages, [0], tokens)
    check_same_memory(pool, expected)


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_any_number_of_programs_does_the_work(programs):
    pool = poisoned((2, 9, 16, 4, 8), torch.float32)
    shard = random_bits((2, 5, 16, 4, 8), torch.float32)
    pages = ids(5, 9)
    expected = twin(pool)
    naive.merge_kv(expected, [shard], pages, [0])
    triton_ops.merge_kv(pool, [shard], pages, [0], programs=programs)
    check_same_memory(pool, expected)


def test_pack_undoes_merge():
    shard = random_bits((3, 4, 16, 3, 40), torch.bfloat16)
    pool, out, pages = poisoned((3, 6, 16, 5, 40), torch.bfloat16), poisoned(shard.shape, torch.bfloat16), ids(4, 6)
    triton_ops.merge_kv(pool, [shard], pages, [1])
    triton_ops.pack_kv(out, pool, pages, 1)
    check_same_memory(out, shard)


def test_no_pages_start_nothing():
    pool = poisoned((1, 2, 4, 2, 8), torch.bfloat16)
    triton_ops.merge_kv(pool, [pool[:, :0]], ids(0, 2), [0])
    triton_ops.pack_kv(pool[:, :0], pool, ids(0, 2), 0)
    assert (memory(pool) == POISON).all()


# --- conv windows ------------------------------------------------------------------------------------------------

CONV_LAYOUTS = {
    "channels first": {},
    "channels first, longer window": {"gap": 2, "pitch": 2},
    "window first": {"order": (0, 1, 3, 2)},
    "window first, with a gap": {"order": (0, 1, 3, 2), "gap": 3},
}


def qkv_blocks(shares):
    """Blocks that bring [Q0, K0, V0], [Q1, K1, V1], ... to [Q0, Q1, ..., K0, K1, ..., V0, V1, ...], and the width."""
    blocks, destination = [[] for _ in shares], 0
    for segment in range(3):
        for rank, widths in enumerate(shares):
            blocks[rank].append((sum(widths[:segment]), destination, widths[segment]))
            destination += widths[segment]
    return blocks, destination


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool_layout", CONV_LAYOUTS.values(), ids=CONV_LAYOUTS)
@pytest.mark.parametrize("shard_layout", CONV_LAYOUTS.values(), ids=CONV_LAYOUTS)
@pytest.mark.parametrize("shares", [[(4, 4, 7)], [(4, 8, 33), (8, 4, 7)], [(2, 2, 5), (2, 2, 3), (1, 4, 6)]], ids=len)
def test_reorder_conv_moves_each_segment(dtype, pool_layout, shard_layout, shares):
    layers, n, window = 2, 2, 3
    blocks, channels = qkv_blocks(shares)
    pool = poisoned((layers, 5, channels + 2, window), dtype, **pool_layout)
    shards = [like_layout(random_bits((layers, n, sum(widths), window), dtype), **shard_layout) for widths in shares]
    slots = ids(n, 5)
    expected = twin(pool)
    naive.reorder_conv(expected, shards, slots, blocks)
    triton_ops.reorder_conv(pool, shards, slots, blocks)
    check_same_memory(pool, expected)


def test_conv_in_one_order_takes_the_kernel_and_mixed_orders_do_not():
    first, last = poisoned((1, 2, 6, 3), torch.float32), poisoned((1, 2, 6, 3), torch.float32, order=(0, 1, 3, 2))
    rectangles = triton_ops._conv_rectangles
    assert rectangles(first, first)[0].shape == (1, 2, 1, 18)
    assert rectangles(last, last)[0].shape == (1, 2, 3, 6)
    assert rectangles(first[..., :2], first[..., :2])[0].shape == (1, 2, 6, 2)
    assert rectangles(first, last) is None


# --- SSM states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("checkpoint_stride", [1, 4])
@pytest.mark.parametrize("widths", [[3], [1, 3], [2, 1, 2], [1, 1, 2, 1]], ids=str)
def test_scatter_ssm_writes_the_heads_of_a_slot(dtype, checkpoint_stride, widths):
    layers, n, dv, dk = 2, 3, 5, 8
    pool = poisoned((layers, 5 * checkpoint_stride, sum(widths) + 2, dv, dk), dtype, gap=16, pitch=1)
    shards = [random_bits((layers, n, heads, dv, dk), dtype) for heads in widths]
    slots, starts = ids(n, 5), offsets(widths)
    expected = twin(pool)
    naive.scatter_ssm(expected, shards, slots, starts, checkpoint_stride)
    triton_ops.scatter_ssm(pool, shards, slots, starts, checkpoint_stride)
    check_same_memory(pool, expected)


@pytest.mark.parametrize(("dv", "dk"), [(128, 128), (96, 160), (3, 7)])
def test_rows_longer_than_a_tile_are_cut(dv, dk):
    """64 KiB per head are two whole tiles; 96 x 160 x 4 bytes end inside a tile."""
    pool = poisoned((1, 3, 4, dv, dk), torch.float32)
    shard = random_bits((1, 1, 2, dv, dk), torch.float32)
    slots = ids(1, 3)
    expected = twin(pool)
    naive.scatter_ssm(expected, [shard], slots, [1])
    triton_ops.scatter_ssm(pool, [shard], slots, [1])
    check_same_memory(pool, expected)


# --- addresses and tiles -----------------------------------------------------------------------------------------


@pytest.fixture
def far(monkeypatch):
    """9 GiB of addresses; memory stands behind the pages that are touched, and only there."""
    # The interpreter copies whole storages back to where they came from, also where that is where they are.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    addresses = mmap.mmap(-1, 9 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(addresses, dtype=torch.int8)


def test_slots_lie_behind_two_to_the_32(far):
    stride, slot, cells = 2**30 + 64, 5, 64
    pool = far.as_strided((1, slot + 1, 2, 1, cells), (0, stride, cells, cells, 1))
    shard = random_bits((1, 1, 1, 1, cells), torch.int8)
    place = slot * stride + cells
    assert place > 2**32
    too_low = far[place % 2**32 :][:cells]
    too_low[:] = -1
    far[place - cells : place + 2 * cells] = -1
    triton_ops.scatter_ssm(pool, [shard], torch.tensor([slot]), [1])
    assert torch.equal(far[place : place + cells], shard.flatten())
    assert (far[place - cells : place] == -1).all()
    assert (far[place + cells : place + 2 * cells] == -1).all()
    assert (too_low == -1).all()


def test_layers_and_tokens_lie_behind_two_to_the_32(far):
    """The layer stride itself is past 2**32, and a page of two row blocks is so wide that its last tokens are."""
    token, width = 2**23 + 128, 64
    page = triton_ops.tile_shape(width, 1, TILE)[0] + 8
    layer = 2**32 + 4096
    pool = far.as_strided((2, 1, page, 1, width), (layer, layer, token, width, 1))
    assert (page - 8) * token > 2**32
    values = random_bits(pool.shape, torch.int8)
    pool.copy_(values)
    out = poisoned(values.shape, torch.int8)
    triton_ops.pack_kv(out, pool, torch.tensor([0]), 0)
    assert torch.equal(out, values)


@pytest.mark.parametrize("tile", [32 * 1024, 64 * 1024])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_tiles_have_one_size_and_hold_a_row_where_they_can(itemsize, tile):
    listed = triton_ops.tile_shapes(itemsize, tile)
    assert len(set(listed)) == len(listed)
    for cols in [1, 3, 31, 32, 33, 128, 129, 4096, 100_000]:
        rows, width = triton_ops.tile_shape(cols, itemsize, tile)
        assert (rows, width) in listed
        assert rows * width * itemsize == tile
        assert width * itemsize % 32 == 0, "a row of a tile does not begin where an NPU wants it"
        assert width >= cols or rows == 1


@pytest.mark.parametrize(("tokens", "row_blocks"), [(1, 1), (16, 1), (17, 2), (128, 8), (129, 9), (200, 13), (256, 16)])
def test_no_tile_is_empty_and_no_program_idle(monkeypatch, tokens, row_blocks):
    """Pages of 128 tokens of 2 KiB: 16 rows to a tile. A device would start a copy of no rows for an empty one."""
    launches = []

    class Kernels:
        class copy_blocks:
            def __class_getitem__(cls, grid):
                return lambda *_, **figures: launches.append((grid, figures["tasks"]))

    monkeypatch.setattr(triton_ops, "triton_kernels", Kernels)
    n = -(-tokens // 128)
    shard = poisoned((3, n, 128, 4, 256), torch.bfloat16)
    triton_ops.merge_kv(shard, [shard], ids(n, n), [0], tokens, programs=32)
    assert launches == [((min(32, 3 * row_blocks),), 3 * row_blocks)]


def test_too_many_tiles_are_refused():
    everywhere = torch.zeros(1, dtype=torch.int8).expand(2**16, 2**15, 1, 1, 1)
    with pytest.raises(MergeError, match="copy fewer items at once"):
        triton_ops.scatter_ssm(everywhere, [everywhere], torch.zeros(1, dtype=torch.int64), [0])


def test_the_interpreter_stays_in_its_copy():
    assert isinstance(interpreted_kernels().copy_blocks, InterpretedFunction)
    assert isinstance(triton_kernels.copy_blocks, JITFunction)
    assert not triton.knobs.runtime.interpret
    assert Path(interpreted_kernels().__file__) == Path(triton_kernels.__file__)


@pytest.mark.parametrize("side", ["pool", "shard"])
@pytest.mark.parametrize(
    ("heads", "step"),
    [(1, (1, 2)), (2, (1, 2)), (2, (3, 1))],
    ids=["channels-of-one-head-apart", "channels-apart", "heads-apart"],
)
def test_columns_with_gaps_are_refused(heads, step, side):
    """An evenly strided pair of axes can be viewed as one axis, but not as one of dense elements."""
    plain = (torch.zeros(1, 3, 2, heads, 4, dtype=torch.int16), torch.ones(1, 1, 2, heads, 4, dtype=torch.int16))
    wide = [torch.zeros(*x.shape[:3], heads * step[0], 4 * step[1], dtype=torch.int16) for x in plain]
    apart = [x[:, :, :, :: step[0], :: step[1]] for x in wide]
    pool, shard = (apart[0], plain[1]) if side == "pool" else (plain[0], apart[1])
    with pytest.raises(MergeError, match="rows of dense elements"):
        triton_ops.merge_kv(pool, [shard], torch.tensor([1]), [0])
    assert not pool.any()
