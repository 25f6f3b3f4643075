"""The kernels as triton-ascend compiles them for NPUs, down to Linalg: they move tiles in bulk, in every variant.

The compiler lives in .venv-ascend, which scripts/setup_ascend_env.py makes; one process there compiles everything.
"""

import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from sglang_hetero.merge import chip as chips
from sglang_hetero.merge import triton_kernels, triton_ops
from tests.ascend_compile import linalg

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-ascend" / "bin" / "python"
COMPILER = ROOT / "tests" / "ascend_compile" / "compile_kernels.py"
BAD_KERNELS = ROOT / "tests" / "ascend_compile" / "bad_kernels.py"
COMPILER_SECONDS = 300

# Two generations with their own branches in the compiler: A2 and A3 (Ascend 910B, 910_93), and 910_95.
CHIPS = {
    "Ascend910B2": {},
    "Ascend910_9579": {"compile_on_910_95": True, "enable_select_analysis": True},
}
ELEMENTS = {"i8": 1, "i16": 2, "i32": 4}
DIRECTIONS = {"scatter": True, "gather": False}
# Triton compiles anew for figures that are multiples of 16 or equal 1. `ids` and counts are exempt (do_not_specialize).
FIGURES = {"odd": 33, "multiples of 16": 32, "ones": 1}
BAD_TILE = 64
LIST = "list"
"""In the place of a direction: the kernel that copies tiles by a list."""
TILE_LOADS, ROW_LOADS = 6, 4
"""Figures of a tile that it reads, and of one that is a single row and so has no use for strides."""
LISTED = {"any place": 1, "places at multiples of 16 bytes": 16}

BAD = {
    "gather_elements": "marked DiscreteMemAccess",
    "scatter_elements": "marked ExtractedLoadOrStore",
    "scatter_rows": "marked DiscreteMemAccess",
    "copy_one_by_one": "a loop over elements",
    "copy_every_other_column": "takes elements apart",
    "copy_with_holes": "dst is not only written",
}


def tiles(chip, element):
    """All shapes of a tile that the launchers can ask for."""
    return triton_ops.tile_shapes(ELEMENTS[element], chips.npu(chip, 0).tile_bytes)


def variants(chip, element):
    """(tile, figures) of all compilations that the launchers can ask for, per chip and direction."""
    return itertools.product(tiles(chip, element), FIGURES)


def kernel_job(chip, element, direction, tile, figures):
    names = [parameter.name for parameter in triton_kernels.copy_blocks.params if not parameter.is_constexpr]
    arguments = {name: FIGURES[figures] for name in names if name not in ("dst", "src", "ids")}
    constants = {"SCATTER": DIRECTIONS[direction], "BLOCK_ROWS": tile[0], "BLOCK_COLS": tile[1]}
    return {
        "file": triton_kernels.__file__,
        "kernel": "copy_blocks",
        "element": element,
        "aligned": figures != "odd",
        "arguments": arguments | constants,
        "arch": chip,
        "options": CHIPS[chip],
    }


def listed_job(chip, element, tile, align):
    size = ELEMENTS[element]
    constants = {"ALIGN": max(1, LISTED[align] // size), "BLOCK_ROWS": tile[0], "BLOCK_COLS": tile[1]}
    return {
        "file": triton_kernels.__file__,
        "kernel": "copy_tiles",
        "element": element,
        "aligned": LISTED[align] > 1,
        "arguments": {"tiles": FIGURES["odd"]} | constants,
        "arch": chip,
        "options": CHIPS[chip],
    }


def on_chip(chip):
    """Bytes of a vector core's memory, by CANN's own name of the chip."""
    return linalg.UNIFIED_BUFFER_BYTES[chip]


def bad_job(chip, kernel):
    return {
        "file": str(BAD_KERNELS),
        "kernel": kernel,
        "element": "i16",
        "aligned": False,
        "arguments": {"stride": 33, "BLOCK": BAD_TILE},
        "arch": chip,
        "options": CHIPS[chip],
    }


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Key -> Linalg text, or the reason why there is none: keys (chip, element, direction, ...) and (chip, name)."""
    if not PYTHON.exists():
        pytest.fail("there is no .venv-ascend with Triton's compiler for NPUs: run `make test` or `make ascend-env`")
    jobs = {
        (chip, element, direction, *variant): kernel_job(chip, element, direction, *variant)
        for chip, element, direction in itertools.product(CHIPS, ELEMENTS, DIRECTIONS)
        for variant in variants(chip, element)
    }
    jobs |= {
        (chip, element, LIST, tile, align): listed_job(chip, element, tile, align)
        for chip, element, align in itertools.product(CHIPS, ELEMENTS, LISTED)
        for tile in tiles(chip, element)
    }
    jobs |= {(chip, kernel): bad_job(chip, kernel) for chip, kernel in itertools.product(CHIPS, BAD)}
    folder = tmp_path_factory.mktemp("ascend")
    asked, answered = folder / "jobs.json", folder / "results.json"
    asked.write_text(json.dumps(list(jobs.values())))
    # Triton's switches are about another Triton; -I shuts out PYTHONPATH, which may lead to this project's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [PYTHON, "-I", COMPILER, asked, answered],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMPILER_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"`make ascend-env` repairs .venv-ascend where it is broken:\n{done.stdout}"
    return dict(zip(jobs, json.loads(answered.read_text()), strict=True))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_variant_moves_tiles_in_bulk(compiled, chip, element, direction):
    for tile, figures in variants(chip, element):
        result = compiled[chip, element, direction, tile, figures]
        assert "linalg" in result, f"tile {tile}, {figures}: {result['error']}"
        found = linalg.faults(result["linalg"], element, tile, on_chip(chip))
        assert not found, f"tile {tile}, {figures}: {found}\n{result['linalg']}"


@pytest.mark.parametrize("align", LISTED)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_tiles_by_list_are_moved_in_bulk(compiled, chip, element, align):
    for tile in tiles(chip, element):
        result = compiled[chip, element, LIST, tile, align]
        assert "linalg" in result, f"tile {tile}: {result['error']}"
        loads = TILE_LOADS if tile[0] > 1 else ROW_LOADS
        found = linalg.faults(result["linalg"], element, tile, on_chip(chip), loads)
        assert not found, f"tile {tile}: {found}\n{result['linalg']}"
        # Places and strides stay as wide as the list has them.
        assert "arith.trunci" not in result["linalg"]


@pytest.mark.parametrize("kernel", BAD)
@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_that_is_no_bulk_copy_is_found_out(compiled, chip, kernel):
    result = compiled[chip, kernel]
    assert "linalg" in result, result["error"]
    found = linalg.faults(result["linalg"], "i16", (BAD_TILE, BAD_TILE), on_chip(chip))
    assert any(fault.startswith(BAD[kernel]) for fault in found), found


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("chip", CHIPS)
def test_addresses_are_computed_in_64_bits(compiled, chip, direction):
    """Layer, item and row times its stride, on both sides, and nothing is cut to 32 bits afterwards."""
    for tile in tiles(chip, "i16"):
        text = compiled[chip, "i16", direction, tile, "odd"]["linalg"]
        assert len(re.findall(r"arith\.muli .* : i64", text)) == 6
        assert "arith.trunci" not in text


@pytest.mark.parametrize(("chip", "cols"), [("Ascend910B2", 32 * 1024), ("Ascend910_9579", 48 * 1024)])
def test_an_oversized_tile_is_found_out(chip, cols):
    assert any("does not fit on the chip" in fault for fault in linalg.faults("", "i32", (1, cols), on_chip(chip)))
    fits = triton_ops.tile_shape(2**20, 4, chips.npu(chip, 0).tile_bytes)
    assert not any("does not fit on the chip" in fault for fault in linalg.faults("", "i32", fits, on_chip(chip)))


@pytest.mark.parametrize("chip", CHIPS)
def test_rows_of_a_tile_begin_where_the_chip_wants_them(chip):
    for element, size in ELEMENTS.items():
        assert all(cols * size % linalg.ROW_ALIGNMENT == 0 for _, cols in tiles(chip, element))
