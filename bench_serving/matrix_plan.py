"""The cells of a matrix: topologies, shapes, rounds, and what identifies a result. Pure: no processes, no sockets.

A cell is one topology under one shape of traffic in one round. Its key is a digest of everything that its figures
depend on, so that a file of results can be gone on with, and never mixes what was measured differently.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from sglang_hetero.errors import OptionError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.options import Options

TOPOLOGIES = ("mixed_tp2", "mixed_tp4", "p2_d1", "p2_d2", "p2x2_d2")
"""Those of the seed (data/README.md), in its order."""
WARM_UPS_PER_STREAM = 2
"""Warm-up requests for each request that runs at the same time: the seed's 16/32/64 for 8/16/32."""
RESERVED_TOKENS = 512
"""Of KV cache, for each request: what SGLang's decode keeps free for a running one (--num-reserved-decode-tokens)."""


@dataclass(frozen=True)
class Lengths:
    """Prompts of a data set: how many, their least, most and total number of tokens."""

    count: int
    least: int
    most: int
    total: int

    @property
    def mean(self) -> float:
        return self.total / self.count

    def divided(self, tokens: int, count: int) -> "Lengths":
        """Prompts shorter by `tokens`, and fewer by `count`."""
        fewer = -(-self.count // count)
        return Lengths(
            fewer, -(-self.least // tokens), self.most // tokens, round(self.total / self.count / tokens * fewer)
        )


@dataclass(frozen=True)
class Shape:
    """Traffic: exact output tokens of each request, requests at the same time, and the seed's shape that it stands for
    (output tokens, concurrency)."""

    output: int
    concurrency: int
    stands_for: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.output}x{self.concurrency}"

    @property
    def warm_ups(self) -> int:
        return WARM_UPS_PER_STREAM * self.concurrency


@dataclass(frozen=True)
class Scale:
    """How large: `full` is the seed's contract. minutes: what a cell may take before it counts as hung."""

    name: str
    lengths: Lengths
    shapes: tuple[Shape, ...]
    rounds: int
    minutes: int


SEED_LENGTHS = Lengths(51, 16422, 20465, 948183)
"""The seed's: 948,183 is the only total whose mean over 51 is its 18,591.824."""
SEED_SHAPES = tuple(Shape(output, streams, (output, streams)) for output in (32, 64) for streams in (8, 16, 32))

SMALL_COUNTS = 4
"""Small counts are the seed's over this: requests 13, output 8 and 16, concurrency 2 and 8, warm-ups 4 and 16. So the
requests per stream (1.6 at the higher concurrency) and the warm-ups per stream stay what they are. With 8 instead of
4 the outputs would be 4 and 8 tokens, of which a verify step with MTP depth 3 may accept all at once."""
SMALL_PROMPTS = 64
"""Small prompts have the seed's tokens over this: 257 to 319. What is left is longer than the window of the convolution
and the chunks of the linear attention (64), so that no path is skipped."""
SMALL_SHAPES = (SEED_SHAPES[0], SEED_SHAPES[-1])
"""Of the six only the lightest and the heaviest: five topologies are 40 processes to start for each shape, 5 minutes of
two cores, and 20 minutes are what `small` may take."""


def _small(shape: Shape) -> Shape:
    return Shape(shape.output // SMALL_COUNTS, shape.concurrency // SMALL_COUNTS, shape.stands_for)


FULL = Scale("full", SEED_LENGTHS, SEED_SHAPES, rounds=3, minutes=240)
SMALL = Scale(
    "small",
    SEED_LENGTHS.divided(SMALL_PROMPTS, SMALL_COUNTS),
    tuple(_small(shape) for shape in SMALL_SHAPES),
    rounds=1,
    minutes=20,
)
SCALES = {scale.name: scale for scale in (FULL, SMALL)}


@dataclass(frozen=True)
class Cell:
    """One measurement. round: from 1 on."""

    topology: str
    shape: Shape
    round: int

    @property
    def name(self) -> str:
        return f"{self.topology}:{self.shape.name}"

    @property
    def label(self) -> str:
        """For a line of progress and for folders."""
        return f"{self.topology}-{self.shape.name}-round{self.round}"

    @property
    def devices(self) -> int:
        """Ranks of all servers: the devices, where each rank has one of its own."""
        return topology.parse(self.topology).ranks


def cells(scale: Scale, topologies: Sequence[str], rounds: int) -> list[Cell]:
    """In the order in which they are run: what is compared lies close together, and a drift of the machine meets every
    topology, because a whole round ends before the next begins."""
    return [Cell(each, shape, number + 1) for number in range(rounds) for shape in scale.shapes for each in topologies]


def only(found: Iterable[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Those that one of the patterns names: a topology, a shape (32x8), or both (p2_d1:32x8), with * and ?.

    Raises OptionError for a pattern that names none.
    """
    rest = list(found)
    if not patterns:
        return rest
    kept = set()
    for pattern in patterns:
        hits = {
            cell
            for cell in rest
            if any(fnmatchcase(text, pattern) for text in (cell.name, cell.topology, cell.shape.name))
        }
        if not hits:
            names = list(dict.fromkeys(cell.name for cell in rest))
            raise OptionError(f"--only {pattern}: names no cell; there are {', '.join(names)}")
        kept |= hits
    return [cell for cell in rest if cell in kept]


def sized(options: Options, scale: Scale, shape: Shape) -> Options:
    """`options` with room for the whole concurrency on each server, where 0 asks for that, and never less than the
    launcher gives otherwise: the caches must not be what is measured."""
    each = scale.lengths.most + shape.output + RESERVED_TOKENS
    pages = -(-each // options.page_size)
    return replace(
        options,
        max_requests=options.max_requests or max(Options().max_requests, shape.concurrency),
        max_tokens=options.max_tokens or max(Options().max_tokens, shape.concurrency * pages * options.page_size),
    )


def key(identity: Mapping[str, Any], cell: Cell) -> str:
    """Digest of what was measured (`identity`: model, data, versions, settings, machine), and of which cell."""
    text = json.dumps({"identity": identity, "cell": asdict(cell)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seconds_left(todo: Sequence[Cell], took: Mapping[str, Sequence[float]]) -> float | None:
    """What the cells of `todo` will take, from the seconds of those that are done, by name; None if none is done.

    A cell that has never run is taken for the mean of its topology, else for the mean of all.
    """
    every = [seconds for each in took.values() for seconds in each]
    if not every:
        return None

    def expected(cell: Cell) -> float:
        own = took.get(cell.name) or [
            seconds for name, each in took.items() if name.split(":")[0] == cell.topology for seconds in each
        ]
        known = own or every
        return sum(known) / len(known)

    return sum(expected(cell) for cell in todo)
