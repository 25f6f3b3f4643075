"""Cells, sizes and keys of a matrix."""

from dataclasses import replace

import pytest

from bench_serving import matrix_plan
from bench_serving.matrix_plan import (
    FULL,
    RESERVED_TOKENS,
    SCALES,
    SMALL,
    TOPOLOGIES,
    Cell,
    Shape,
    cells,
    key,
    only,
    sized,
)
from sglang_hetero.errors import OptionError
from sglang_hetero.launcher.options import Options

CELL = Cell("p2_d1", Shape(32, 8, (32, 8)), 1)


def test_full_is_the_seeds_contract():
    assert (FULL.lengths.count, FULL.lengths.least, FULL.lengths.most) == (51, 16422, 20465)
    assert round(FULL.lengths.mean, 3) == 18591.824
    assert [(shape.output, shape.concurrency, shape.warm_ups) for shape in FULL.shapes] == [
        (output, *streams) for output in (32, 64) for streams in ((8, 16), (16, 32), (32, 64))
    ]
    assert len(cells(FULL, TOPOLOGIES, 1)) == 30


def test_small_keeps_the_proportions():
    for own in SMALL.shapes:
        output, streams = own.stands_for
        assert (output, streams) in {(shape.output, shape.concurrency) for shape in FULL.shapes}
        assert output / own.output == streams / own.concurrency == 4
    lengths = SMALL.lengths
    assert (lengths.count, lengths.least, lengths.most) == (13, 257, 319)
    assert lengths.mean == pytest.approx(FULL.lengths.mean / 64, abs=0.1)
    assert lengths.count * lengths.least <= lengths.total <= lengths.count * lengths.most


def test_rounds_come_last_and_topologies_lie_together():
    found = cells(SMALL, ["p2_d1", "p2_d2"], 2)
    assert [(cell.round, cell.shape.name, cell.topology) for cell in found] == [
        (number, shape.name, name) for number in (1, 2) for shape in SMALL.shapes for name in ("p2_d1", "p2_d2")
    ]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], 10),
        (["p2_d1"], 2),
        (["8x2"], 5),
        (["p2_d1:8x2"], 1),
        (["mixed_*"], 4),
        (["p2_d1", "p2_d1:8x2", "*:16x8"], 6),
    ],
)
def test_only(patterns, names):
    found = only(cells(SMALL, TOPOLOGIES, 1), patterns)
    assert len(found) == names
    assert found == [cell for cell in cells(SMALL, TOPOLOGIES, 1) if cell in found], "the plan's order"


def test_only_names_what_there_is():
    with pytest.raises(OptionError, match=r"--only p2_d3: names no cell; there are mixed_tp2:8x2"):
        only(cells(SMALL, TOPOLOGIES, 1), ["8x2", "p2_d3"])


def test_devices_are_ranks():
    assert {name: Cell(name, CELL.shape, 1).devices for name in TOPOLOGIES} == {
        "mixed_tp2": 2,
        "mixed_tp4": 4,
        "p2_d1": 3,
        "p2_d2": 4,
        "p2x2_d2": 6,
    }


def test_servers_have_room_for_the_whole_concurrency():
    options = sized(Options(max_tokens=0, max_requests=0, page_size=64), FULL, FULL.shapes[-1])
    assert options.max_requests == 32
    assert options.max_tokens % 64 == 0
    assert options.max_tokens >= 32 * (20465 + 64 + RESERVED_TOKENS)
    assert options.max_tokens - 32 * 64 < 32 * (20465 + 64 + RESERVED_TOKENS)
    small = sized(Options(max_tokens=0, max_requests=0), SMALL, SMALL.shapes[0])
    assert (small.max_requests, small.max_tokens) == (Options().max_requests, Options().max_tokens), (
        "not less than usual"
    )
    given = Options(max_tokens=5000, max_requests=3)
    assert sized(given, FULL, CELL.shape) == given


@pytest.mark.parametrize(
    "other",
    [
        replace(CELL, topology="p2_d2"),
        replace(CELL, round=2),
        replace(CELL, shape=Shape(64, 8, (64, 8))),
        replace(CELL, shape=Shape(32, 16, (32, 16))),
    ],
)
def test_each_cell_has_a_key(other):
    assert key({"model": "tiny"}, other) != key({"model": "tiny"}, CELL)


def test_a_key_depends_on_what_is_measured_and_on_nothing_else():
    one = key({"model": "tiny", "settings": {"mtp": 3, "chunk": 0}}, CELL)
    assert one == key({"settings": {"chunk": 0, "mtp": 3}, "model": "tiny"}, replace(CELL))
    assert one != key({"model": "tiny", "settings": {"mtp": 2, "chunk": 0}}, CELL)


def test_time_left():
    todo = [CELL, Cell("p2_d2", CELL.shape, 1), replace(CELL, shape=Shape(64, 8, (64, 8)))]
    assert matrix_plan.seconds_left(todo, {}) is None
    took = {"p2_d1:32x8": [10.0, 20.0], "mixed_tp2:32x8": [60.0]}
    # Its own mean; the mean of all for a topology that has not run; another shape of the topology.
    assert matrix_plan.seconds_left(todo, took) == pytest.approx(15 + 30 + 15)
    assert matrix_plan.seconds_left([], took) == 0


def test_scales_go_by_name():
    assert set(SCALES) == {"full", "small"}
    assert SCALES["full"].rounds >= 3
