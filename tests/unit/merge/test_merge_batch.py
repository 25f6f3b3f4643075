"""Batches, on the CPU and through the kernel (in Triton's interpreter): every byte of every destination, by the oracle.

The oracle's worlds (tests/reshard_oracle) write sources and expected destinations without any code of the merge. Here
their pieces lie in one poisoned arena, areas in any order and at any distance, and are merged several at a time.
"""

import contextlib
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from support import interpreted_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import GridExecutor

from sglang_hetero.errors import MergeError
from sglang_hetero.layout import Item, Role
from sglang_hetero.merge import Assembler, batch, chip, triton_batch, triton_kernels
from sglang_hetero.merge.batch import Staged
from sglang_hetero.merge.copies import StridedCopy, fold, rectangle
from sglang_hetero.reshard import plan
from tests.reshard_oracle import handover, worlds
from tests.reshard_oracle.handover import STAGING_POISON, Request, decode_rank, prefill_ranks, serve
from tests.reshard_oracle.model import Segment, conv, heads_kv, latent_kv, ssm
from tests.reshard_oracle.rank import WINDOW_FIRST, Format, Shape

PATHS = ("cpu", "kernel")
PIECES_AT_ONCE = 5
PROGRAMS = 3
"""Fewer than most batches have tiles, so that programs share them."""
ALIGNMENT = 4
"""Bytes: of every area, enough for every element."""
FAMILIES = {"gdn": worlds.gdn(), "kda_mla": worlds.kda(), "mamba2": worlds.mamba2()}
EXAMPLES = {"cpu": 60, "kernel": 25}


@contextlib.contextmanager
def path(name):
    """Batches take this path, from areas in an arena; yields the launches of the kernel as they are planned."""
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "merge", merge_in_batches)
        if name == "kernel":
            # The interpreter copies whole storages back to where they came from, also where that is where they are.
            patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
            patch.setattr(triton_batch, "triton_kernels", interpreted_kernels())
            patch.setattr(batch, "_on_cpu", triton_batch.Launcher(PROGRAMS))
            planned = triton_batch.plan_launches

            def plan_launches(*arguments):
                launches.append(planned(*arguments))
                return launches[-1]

            patch.setattr(triton_batch, "plan_launches", plan_launches)
        yield launches


def merge_in_batches(assembler, arrived, pieces, into):
    rng = np.random.default_rng(len(arrived))
    places, size = {}, 0
    for key, areas in arrived.items():
        for source in rng.permutation(sorted(areas)).tolist():
            size += ALIGNMENT * int(rng.integers(0, 5))
            places[key, source] = size
            size += -(-len(areas[source]) // ALIGNMENT) * ALIGNMENT
    arena = torch.full((size + ALIGNMENT,), STAGING_POISON, dtype=torch.uint8)
    for (key, source), place in places.items():
        area = arrived[key][source]
        arena[place : place + len(area)] = torch.from_numpy(area)
    before = arena.clone()
    staged = []
    for (role, layer, first), areas in arrived.items():
        piece = pieces[role, layer, first]
        ids = [into.slot] if piece.share.item is Item.SLOT else into.pages[first : first + piece.pages]
        own = {source: places[(role, layer, first), source] for source in areas}
        staged.append(Staged(role, layer, np.array(ids, dtype=np.int64), piece.tokens, own))
    order = rng.permutation(len(staged)).tolist()
    for start in range(0, len(order), PIECES_AT_ONCE):
        assembler.merge_batch(arena, [staged[number] for number in order[start : start + PIECES_AT_ONCE]])
    assert torch.equal(arena, before), "a merge has written into staging"


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_world(family, name):
    @settings(
        max_examples=EXAMPLES[name],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(worlds.cases(FAMILIES[family]))
    def sweep(case):
        world = case.world
        prefill, decode = zip(world.tp, world.shapes, strict=True)
        serve(
            world.model,
            prefill,
            decode,
            Request(case.tokens, case.chunks, world.seed),
            stages=world.stages,
            dp=world.dp,
            policy=world.policy,
            decode_model=world.decode_model,
            rng=world.seed,
        )

    with path(name):
        sweep()


QKV = (Segment("q", 12, 2), Segment("k", 12, 2), Segment("v", 12, 3))
MODEL = (
    heads_kv(Role.TARGET_KEY, 12, 16, (0, 2)),
    heads_kv(Role.TARGET_VALUE, 12, 16, (0, 2)),
    conv(QKV, 3, (1, 3)),
    ssm(12, 4, 8, (1, 3)),
)
TP = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 3), (3, 2), (4, 6), (2, 2)]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("layout", ["channels-first", "window-first", "from channels-first to window-first"])
@pytest.mark.parametrize("tp", TP, ids=lambda tp: f"P{tp[0]}D{tp[1]}")
@pytest.mark.parametrize(("page_size", "tokens"), [(1, 3), (4, 7), (4, 8), (128, 129)])
def test_sizes_pages_and_windows(name, layout, tp, page_size, tokens):
    last, first = {Role.CONV: WINDOW_FIRST}, {Role.CONV: Format(dead_before=0, dead_after=2)}
    source = last if layout == "window-first" else first
    destination = first if layout == "channels-first" else last
    with path(name):
        serve(
            MODEL,
            (tp[0], Shape(page_size=page_size, formats=source)),
            (tp[1], Shape(page_size=page_size, formats=destination)),
            Request(tokens),
        )


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("pages", "runs"), [((1, 2, 3, 4), 1), ((4, 3, 2, 1), 4), ((2, 3, 1, 6), 3)], ids=str)
@pytest.mark.parametrize("tokens", [97, 128])
def test_pages_that_follow_each_other_are_one_run(name, pages, runs, tokens):
    at = {"decode": handover.Place(pages, 1)}
    shape = Shape(page_size=32)
    with path(name) as launches:
        serve(MODEL[:1], (2, shape), (1, shape), Request(tokens), at=at)
    if name == "kernel":
        # 6 heads of 16 elements of 2 bytes in a token: 192 bytes, in rows of 256, and 128 of them fill a tile.
        assert [len(launch.tiles) for planned in launches for launch in planned] == [2 * 2 * runs]


@pytest.mark.parametrize("name", PATHS)
def test_opaque_pages_move_whole(name):
    model = (latent_kv(Role.TARGET_LATENT, {"latent": 4}, (0, 1)),)
    shape = Shape(page_size=4, formats={Role.TARGET_LATENT: Format(encoding="packed-rows")})
    for tp in ((4, 1), (1, 4), (2, 2)):
        with path(name):
            serve(model, (tp[0], shape), (tp[1], shape), Request(5))


def test_a_batch_is_one_launch_for_each_row_length():
    """K and V of two layers and SSM have rows of other lengths; the layers' buffers are apart."""
    shape = Shape(page_size=4)
    with path("kernel") as launches:
        serve(MODEL, (2, shape), (1, shape), Request(7))
    assert all(len(planned) <= 4 for planned in launches)
    assert sum(len(planned) for planned in launches) < len(MODEL) * 2
    assert {launch.element for planned in launches for launch in planned} == {4}


def test_bytes_at_odd_places_are_moved_as_such():
    model = (heads_kv(Role.TARGET_KEY, 2, 3, (0, 1), "int8"),)
    shape = Shape(page_size=3, formats={Role.TARGET_KEY: Format(row_gap=1, item_gap=3)})
    with path("kernel") as launches:
        serve(model, (2, shape), (1, shape), Request(8))
    assert {(launch.element, launch.align) for planned in launches for launch in planned} == {(1, 1)}


def test_a_tile_of_a_long_row_has_its_columns():
    model = (ssm(4, 96, 160, (0,), "float32"),)
    with path("kernel") as launches:
        serve(model, (2, Shape()), (1, Shape()), Request(2))
    tiles = launches[0][0].tiles
    # 2 heads x 96 x 160 x 4 bytes are 3.75 tiles of 32 KiB.
    assert tiles[:4, triton_batch.COLS].tolist() == [8192, 8192, 8192, 6144]


@pytest.mark.parametrize(("align", "vectors"), [(4, True), (1, False)])
def test_a_gpu_moves_16_bytes_at_a_time_where_places_allow(align, vectors, tmp_path):
    """Compiled for a GPU that need not be there: what the table's figures are multiples of reaches the compiler."""
    source = ASTSource(
        triton_kernels.copy_tiles,
        signature={"dst": "*i32", "src": "*i32", "table": "*i64", "tiles": "i32"}
        | dict.fromkeys(("ALIGN", "BLOCK_ROWS", "BLOCK_COLS"), "constexpr"),
        constexprs={"ALIGN": align, "BLOCK_ROWS": 64, "BLOCK_COLS": 128},
        attrs={argument: [["tt.divisibility", 16]] for argument in [(0,), (1,)]},
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": chip.WARPS})
    text = compiled.asm["ptx"]
    for access in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert (access in text) is vectors


def test_a_launcher_keeps_nothing_of_a_batch(monkeypatch):
    """torch's allocators keep a table until the device has used it; one that is kept here lies there while idle."""
    tables = []
    made = triton_batch.to_device

    def to_device(table, device):
        there = made(table, device)
        tables.append(weakref.ref(there))
        return there

    monkeypatch.setattr(triton_batch, "to_device", to_device)
    shape = Shape(page_size=4)
    with path("kernel"):
        serve(MODEL, (2, shape), (1, shape), Request(7))
        gc.collect()
        assert tables
        assert not any(table() is not None for table in tables)


def test_a_table_goes_to_a_device_from_pinned_memory_without_waiting(monkeypatch):
    """On the meta device. Only of pinned memory do the allocators know that a copy is under way."""
    pinned, copied = [], []

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, device, *, non_blocking):
        copied.append((tensor, device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    table, device = np.arange(8), torch.device("meta")
    there = triton_batch.to_device(table, device)
    assert len(pinned) == len(copied) == 1
    assert copied[0][0] is pinned[0] is there
    assert copied[0][1:] == (device, True)
    assert torch.equal(there, torch.from_numpy(table))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_of_a_device_have_one_launcher_from_the_start(device, monkeypatch):
    """Two threads merge; a launcher that the first of them makes would be made twice."""
    _, assembler = world()
    layers = {
        key: batch.Layer(layer.shares, layer.memory.to(device)) for key, layer in assembler._batches._layers.items()
    }
    made = []
    monkeypatch.setattr(triton_batch, "Launcher", lambda: lambda arena, moves: made.append((arena, moves)))
    batches = batch.Batches(layers)
    monkeypatch.delattr(triton_batch, "Launcher")
    arena = torch.zeros(2 * AREA, dtype=torch.uint8, device=device)
    batches.merge(arena, [PIECE])
    assert [(to is arena, len(moves)) for to, moves in made] == [(True, 1)] * (device == "meta")


# --- what is refused ---------------------------------------------------------------------------------------------


def world():
    shape = Shape(page_size=2)
    to = decode_rank(MODEL, 1, 0, shape)
    made = plan([rank.manifest for rank in prefill_ranks(MODEL, 2, shape)], to.manifest)
    memory = {key: torch.from_numpy(to.bytes_from(buffer.address)) for key, buffer in to.buffers.items()}
    return to, Assembler(made, memory)


def ids(*values):
    return np.array(values, dtype=np.int64)


AREA = 2 * 2 * 6 * 16 * 2
"""Two pages of two tokens of a source's six heads of 16 elements of two bytes."""
PIECE = Staged(Role.TARGET_KEY, 0, ids(1, 2), 3, {0: 0, 1: AREA})
SLOT = Staged(Role.SSM, 1, ids(1), 0, {0: 0, 1: AREA})


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([replace(PIECE, layer=1)], "layer 1 of target_key is not in the plan"),
        ([replace(PIECE, ids=ids(0, 2))], "item 0 is no request's"),
        ([replace(PIECE, ids=ids(1, 7))], "no item 7; the pool has 0 to 6"),
        ([replace(PIECE, ids=ids())], "a row of int64"),
        ([replace(PIECE, ids=torch.tensor([1, 2]))], "a row of int64"),
        ([replace(PIECE, ids=ids(1, 1))], "item 1 is written twice"),
        ([PIECE, replace(PIECE, ids=ids(3, 2))], "item 2 is written twice"),
        ([replace(PIECE, tokens=2)], "2 tokens do not end in the last of 2 pages of 2"),
        ([replace(PIECE, tokens=5)], "5 tokens do not end in the last of 2 pages of 2"),
        ([replace(PIECE, tokens=None)], "tokens must be an integer"),
        ([replace(PIECE, areas={0: 0})], "nothing has arrived from source 1"),
        ([replace(PIECE, areas={0: 0, 1: AREA + 2})], "do not suit an arena"),
        ([replace(PIECE, areas={0: -2, 1: AREA})], "do not suit an arena"),
        ([replace(PIECE, areas={0: 0, 1: AREA - 1})], "do not suit an arena"),
        ([replace(SLOT, ids=ids(1, 2))], "a request has one slot, 2 were given"),
        ([PIECE, replace(SLOT, ids=ids(9))], "no item 9"),
    ],
)
def test_nothing_is_written_where_one_piece_is_wrong(pieces, message):
    to, assembler = world()
    before = [allocation.copy() for _, allocation in to.allocations]
    with pytest.raises(MergeError, match=message):
        assembler.merge_batch(torch.zeros(2 * AREA, dtype=torch.uint8), pieces)
    for untouched, (_, allocation) in zip(before, to.allocations, strict=True):
        assert (untouched == allocation).all()


def test_the_arena_is_a_row_of_bytes():
    _, assembler = world()
    for arena in (None, torch.zeros(4 * AREA, dtype=torch.uint8)[::2], torch.zeros(2 * AREA, dtype=torch.int8)):
        with pytest.raises(MergeError, match="arena must be a row"):
            assembler.merge_batch(arena, [PIECE])
    with pytest.raises(MergeError, match="the arena lies on meta, but not all caches do"):
        assembler.merge_batch(torch.zeros(2 * AREA, dtype=torch.uint8, device="meta"), [PIECE])


def test_no_pieces_are_no_work():
    _, assembler = world()
    assembler.merge_batch(torch.zeros(1, dtype=torch.uint8), [])


# --- copies on paper ---------------------------------------------------------------------------------------------


def copy(target, source, shape=(4, 2), steps=(100, 1), staged=(2, 1)):
    return StridedCopy(1, target, source, 400, 8, shape, steps, staged)


def cells(copies):
    """{byte of the target: byte of the source} of item 0."""
    found = {}
    for one in copies:
        for at in np.ndindex(*one.shape):
            target = one.target + int(np.dot(at, one.target_steps))
            assert target not in found
            found[target] = one.source + int(np.dot(at, one.source_steps))
    return found


@pytest.mark.parametrize(
    ("copies", "left"),
    [
        ([copy(0, 0), copy(2, 8)], 1),
        ([copy(2, 8), copy(0, 0)], 1),
        ([copy(2, 0), copy(0, 8)], 1),
        ([copy(0, 0), copy(2, 8), copy(4, 16)], 1),
        ([copy(0, 0), copy(2, 8), copy(4, 24)], 2),
        ([copy(0, 0), copy(2, 8, shape=(4, 3))], 2),
        ([copy(10 * seg + 2 * rank, 50 * rank + 2 * seg) for seg in range(3) for rank in range(2)], 1),
    ],
)
def test_folding_moves_the_same_bytes(copies, left):
    folded = fold(copies, 1)
    assert len(folded) == left
    assert cells(folded) == cells(copies)


@pytest.mark.parametrize(
    ("one", "by_token", "rows", "cols", "places"),
    [
        (copy(0, 0), True, 4, 2, 1),
        (copy(0, 0, (4, 3, 2), (100, 10, 1), (6, 2, 1)), True, 4, 2, 3),
        (copy(0, 0, (4, 3, 2), (100, 10, 1), (6, 2, 1)), False, 4, 2, 3),
        (copy(0, 0, (4, 3, 2), (30, 10, 1), (6, 2, 1)), False, 12, 2, 1),
        (copy(0, 0, (4, 2), (2, 1), (2, 1)), False, 1, 8, 1),
        (copy(0, 0, (4, 2), (2, 1), (2, 1)), True, 4, 2, 1),
        (copy(0, 0, (1, 1), (2, 1), (2, 1)), False, 1, 1, 1),
    ],
)
def test_rectangles_hold_the_same_bytes(one, by_token, rows, cols, places):
    found = rectangle(one, by_token=by_token)
    assert (found.rows, found.cols, len(found.places)) == (rows, cols, places)
    moved = {
        target + row * found.target_row + col: source + row * found.source_row + col
        for target, source in found.places
        for row in range(rows)
        for col in range(cols)
    }
    assert moved == cells([one])


def test_two_orders_of_axes_are_no_rectangle():
    assert rectangle(copy(0, 0, (4, 2), (2, 1), (1, 4)), by_token=False) is None
