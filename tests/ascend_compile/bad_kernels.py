"""Kernels as ours must not be: each compiles for an NPU, and none of them into bulk copies.

The test of the compiled kernels has to reject every one of them. Imports nothing but Triton.
"""

import triton
import triton.language as tl


@triton.jit
def gather_elements(dst, src, ids, stride: tl.int64, BLOCK: tl.constexpr):
    """A division and an id for each element read."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids + element // stride)
    tl.store(dst + element, tl.load(src + place * stride + element % stride))


@triton.jit
def scatter_elements(dst, src, ids, stride: tl.int64, BLOCK: tl.constexpr):
    """A division and an id for each element written."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids + element // stride)
    tl.store(dst + place * stride + element % stride, tl.load(src + element))


@triton.jit
def scatter_rows(dst, src, ids, stride: tl.int64, BLOCK: tl.constexpr):
    """Dense rows, but a vector of ids for the rows of one tile."""
    row = tl.arange(0, BLOCK)
    col = tl.arange(0, BLOCK)
    place = tl.load(ids + row)
    tile = tl.load(src + row[:, None] * stride + col[None, :])
    tl.store(dst + place[:, None] * stride + col[None, :], tile)


@triton.jit
def copy_one_by_one(dst, src, ids, stride: tl.int64, BLOCK: tl.constexpr):
    """Scalar loads and stores in a loop: no address is computed per element, none is moved in bulk either."""
    place = tl.load(ids + tl.program_id(0))
    for element in range(BLOCK):
        tl.store(dst + place * stride + element, tl.load(src + element))


@triton.jit
def copy_every_other_column(dst, src, ids, stride: tl.int64, BLOCK: tl.constexpr):
    """A rectangle whose columns are not dense."""
    place = tl.load(ids + tl.program_id(0))
    row = tl.arange(0, BLOCK)
    col = tl.arange(0, BLOCK)
    tile = tl.load(src + row[:, None] * stride + 2 * col[None, :])
    tl.store(dst + place * stride + row[:, None] * stride + col[None, :], tile)


@triton.jit
def copy_with_holes(dst, src, ids, stride: tl.int64, BLOCK: tl.constexpr):
    """A mask that is no bound."""
    place = tl.load(ids + tl.program_id(0))
    col = tl.arange(0, BLOCK)
    mask = col % 3 != 0
    tl.store(dst + place * stride + col, tl.load(src + col, mask=mask), mask=mask)
