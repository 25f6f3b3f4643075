"""The Triton kernels behind the merge: they copy rectangles, one between indexed and consecutive places, one by a list.

Compiled by Triton for CUDA and by triton-ascend for NPUs, so it keeps to what both lower to bulk copies. On an NPU that
means: addresses are scalar arithmetic plus one rectangle `row * stride + column`, and masks are `index < bound`. Others
compile too, but a division or an id per element becomes a loop over elements, and a store under any other mask reads
the destination, blends and writes back what it must not touch (tests/ascend_compile/linalg.py tells them apart).
Imports nothing but Triton: triton-ascend lives in an environment without torch.
"""

import triton
import triton.language as tl


# Figures that change from request to request: compiled once for all values (by default 1 and multiples of 16 get
# compilations of their own, in the middle of serving).
@triton.jit(do_not_specialize=["ids", "tasks", "layer_blocks", "row_blocks", "rows", "last_rows", "last_item"])
def copy_blocks(  # noqa: PLR0917 - the annotations are the types in the compiled signature; Triton calls it by name
    dst,
    src,
    ids,
    tasks: tl.int32,
    layer_blocks: tl.int32,
    row_blocks: tl.int32,
    col_blocks: tl.int32,
    rows: tl.int32,
    last_rows: tl.int32,
    last_item: tl.int32,
    cols: tl.int32,
    dst_layer: tl.int64,
    dst_item: tl.int64,
    dst_row: tl.int64,
    src_layer: tl.int64,
    src_item: tl.int64,
    src_row: tl.int64,
    SCATTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Copy `rows x cols` elements of every layer and item; items lie in order on one side, by id on the other.

    Grid: one axis of any size; its programs share the `tasks` tiles of `BLOCK_ROWS x BLOCK_COLS` elements.

    dst, src: element pointers of one integer type; columns are dense in both.
    ids: int64, one per item: where the item lies in dst (SCATTER) or in src (otherwise).
    tasks: layers * layer_blocks * col_blocks.
    layer_blocks: row blocks of all items of a layer; the last item may have fewer than the others' row_blocks.
    rows, last_rows: rows of an item, and of the last item (number last_item); at least 1.
    *_layer, *_item, *_row: strides in elements. An id counts in items, so offsets reach past 2**32.
    """
    row = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    col = tl.arange(0, BLOCK_COLS)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        first_col = (task % col_blocks) * BLOCK_COLS
        block = task // col_blocks
        layer = (block // layer_blocks).to(tl.int64)
        block = block % layer_blocks
        item = block // row_blocks
        first_row = (block % row_blocks) * BLOCK_ROWS
        place = tl.load(ids + item)
        if SCATTER:
            dst_place = place
            src_place = item.to(tl.int64)
        else:
            dst_place = item.to(tl.int64)
            src_place = place
        start = first_row.to(tl.int64)
        dst_tile = dst + (layer * dst_layer + dst_place * dst_item + start * dst_row + first_col)
        src_tile = src + (layer * src_layer + src_place * src_item + start * src_row + first_col)
        live_rows = tl.where(item == last_item, last_rows, rows) - first_row
        mask = (row < live_rows)[:, None] & (col < cols - first_col)[None, :]
        tile = tl.load(src_tile + (row[:, None] * src_row + col[None, :]), mask=mask)
        tl.store(dst_tile + (row[:, None] * dst_row + col[None, :]), tile, mask=mask)


FIELDS = tl.constexpr(8)
"""Figures per tile in a list, two of them unused: an entry is then one line of 64 bytes of a cache."""


@triton.jit(do_not_specialize=["table", "tiles"])
def copy_tiles(  # noqa: PLR0917 - as above
    dst,
    src,
    table,
    tiles: tl.int32,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Copy tiles that have nothing in common but their size at most, each from anywhere to anywhere.

    Grid: one axis of any size; its programs share the tiles.

    dst, src: element pointers of one integer type, below everything that is copied; what a tile reaches from there may
        be another tensor's.
    table: int64 [tiles, FIELDS], in elements: place in dst, place in src, rows, columns, dst's and src's row stride.
    ALIGN: all of these but the number of rows are multiples of it.
    """
    row = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    col = tl.arange(0, BLOCK_COLS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry = table + tile * FIELDS
        dst_place = tl.multiple_of(tl.load(entry), ALIGN)
        src_place = tl.multiple_of(tl.load(entry + 1), ALIGN)
        rows = tl.load(entry + 2)
        cols = tl.multiple_of(tl.load(entry + 3), ALIGN)
        dst_row = tl.multiple_of(tl.load(entry + 4), ALIGN)
        src_row = tl.multiple_of(tl.load(entry + 5), ALIGN)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        values = tl.load(src + src_place + (row[:, None] * src_row + col[None, :]), mask=mask)
        tl.store(dst + dst_place + (row[:, None] * dst_row + col[None, :]), values, mask=mask)
