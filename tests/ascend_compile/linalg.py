"""Whether a kernel that triton-ascend has lowered to Linalg moves tiles in bulk: pure text, no dependencies.

Judged by what is allowed, not by the fallbacks that are known: one loop over tiles, scalar arithmetic, scalar loads of
an id or of a tile's figures, one copy of a rectangle with dense rows into the chip and one out of it. What
triton-ascend 3.2.0 does with other accesses, all of which compile (bad_kernels.py has one of each):

* an index or a division per element: a loop over elements with `tensor.extract`, marked `ExtractedLoadOrStore` and
  `DiscreteMemAccess`;
* a vector of ids for rows: a loop over rows, marked in the same way;
* columns that are not dense: a copy of all that lies between them, and a strided `tensor.extract_slice`;
* a mask that is no bound: the tile is read from the destination, blended, and written back whole
  (`tt.tensor_kind = 2`), which undoes what others write there meanwhile.
"""

import re
from collections import Counter

# On-chip memory of a vector core (torch_npu 2.13, _inductor/config.py); the compiler doubles the buffer of a tile.
UNIFIED_BUFFER_BYTES = {"Ascend910B2": 192 * 1024, "Ascend910_9579": 256 * 1024}
BUFFERS_PER_TILE = 2
# Rows in that memory begin at multiples of so many bytes.
ROW_ALIGNMENT = 32

# The arguments that the compiler puts in front are two; then come dst and src.
DST, SRC = "%arg2", "%arg3"
# What tt.tensor_kind says of an argument.
READ, WRITTEN = "0", "1"

MARKS = ("ExtractedLoadOrStore", "DiscreteMemAccess", "indirect")
SCALAR_LOAD = "memref.load"
ONCE = (
    "scf.for",
    "memref.alloc",
    "memref.copy",
    "bufferization.to_tensor",
    "bufferization.materialize_in_destination",
)
ALLOWED = {
    *ONCE,
    SCALAR_LOAD,
    "func.func",
    "linalg.fill",
    "memref.reinterpret_cast",
    "memref.subview",
    "scf.if",
    "tensor.extract_slice",
}

OPERATION = re.compile(r"\s*(?:%[^=]* = )?([a-z_]\w*\.[\w.]+)")
ELEMENT_LOOP = re.compile(r"scf\.for .* = %c\S+ to %c\S+ step")
UNIT_STEPS = re.compile(r"\[1(?:, 1)*\] :")


def faults(text: str, element: str, tile: tuple[int, int], on_chip: int, loads: int = 1) -> list[str]:
    """Why this is no bulk copy of tiles `(rows, columns)` of `element` (i8, i16, i32); empty if it is one.

    on_chip: bytes of a core's memory. loads: scalars that the kernel reads for each tile.
    """
    lines = [line.strip() for line in text.splitlines()]
    found = [f"marked {mark}" for mark in MARKS if mark in text]
    found += _operations(lines, loads)
    found += _rectangles(lines, element, tile, on_chip)
    for name, argument, kind in (("dst", DST, WRITTEN), ("src", SRC, READ)):
        if not re.search(rf"{argument}: memref<\?x{element}> {{[^}}]*tt\.tensor_kind = {kind} ", text):
            found.append(f"{name} is not only {'read' if kind == READ else 'written'}")
    return found


def _operations(lines: list[str], loads: int) -> list[str]:
    """Operations that a bulk copy has not, or has in another number."""
    found = []
    counts: Counter[str] = Counter()
    for line in lines:
        match = OPERATION.match(line)
        if match is None:
            continue
        operation = match.group(1)
        counts[operation] += 1
        if operation.startswith("arith."):
            if "tensor<" in line or "vector<" in line:
                found.append(f"arithmetic per element: {line}")
        elif operation not in ALLOWED:
            found.append(f"not part of a bulk copy: {line}")
        elif operation == SCALAR_LOAD and ": memref<1xi64," not in line:
            found.append(f"loads single elements: {line}")
        elif ELEMENT_LOOP.match(line):
            found.append(f"a loop over elements: {line}")
    wanted = dict.fromkeys(ONCE, 1) | {SCALAR_LOAD: loads}
    found += [f"{counts[name]} times {name}" for name, count in wanted.items() if counts[name] != count]
    return found


def _rectangles(lines: list[str], element: str, tile: tuple[int, int], on_chip: int) -> list[str]:
    """Accesses that are no dense rows of the tile, and a tile too large for the chip."""
    rows, cols = tile
    found = []
    for argument in (DST, SRC):
        places = [line for line in lines if f"memref.reinterpret_cast {argument} " in line]
        dense = re.compile(rf"sizes: \[{rows}, {cols}\], strides: \[\S+, 1\] :")
        if len(places) != 1 or not dense.search(places[0]):
            found.append(f"no rectangle {rows} x {cols} of dense rows: {places}")
    for line in lines:
        if ("memref.subview" in line or "tensor.extract_slice" in line) and not UNIT_STEPS.search(line):
            found.append(f"takes elements apart: {line}")
    buffers = [line for line in lines if "memref.alloc" in line]
    size = rows * cols * int(element[1:]) // 8
    if not all(f"memref<{rows}x{cols}x{element}>" in line for line in buffers):
        found.append(f"buffers that are no tile: {buffers}")
    if size * BUFFERS_PER_TILE > on_chip:
        found.append(f"a tile of {size} bytes does not fit on the chip {BUFFERS_PER_TILE} times")
    return found
