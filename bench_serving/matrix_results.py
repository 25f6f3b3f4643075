"""Results of cells: a file to which each is appended, and what several rounds come to. Pure but for that file."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench_serving.matrix_plan import Cell
from sglang_hetero.errors import HeteroError

CLAIM_ROUNDS = 3
"""Fewer rounds than these are no ground for a claim: with one, nothing tells a difference from chance."""

METRICS = (
    "req_per_s",
    "req_per_s_per_device",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
)
"""Of a cell, in the seed's order. Times are means over requests."""


class ResultsError(HeteroError):
    """The file of results cannot be read or written."""


@dataclass(frozen=True)
class Result:
    """Of one cell in one round. Without figures it failed, and reason says why. seconds: start to stop."""

    key: str
    cell: str
    round: int
    figures: Mapping[str, float | None] | None
    reason: str
    seconds: float
    ended: str

    @property
    def ok(self) -> bool:
        return self.figures is not None


def _result(line: str) -> Result | None:
    try:
        said = json.loads(line)
        result = Result(
            **{name: said[name] for name in ("key", "cell", "round", "figures", "reason", "seconds", "ended")}
        )
    except (ValueError, KeyError, TypeError):
        return None
    figures = result.figures
    return result if figures is None or isinstance(figures, dict) else None


class Results:
    """The JSON-lines file of a matrix: one line for each cell that has ended, with all that identifies it.

    The last line of a key counts. A line that an interruption has cut off is left out, and counted in `torn`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0
        self._found: dict[str, Result] = {}
        try:
            text = path.read_text() if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ResultsError(f"{path} cannot be read: {error}; move it away to start anew") from error
        self._cut = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            result = _result(line)
            if result is None:
                self.torn += bool(line.strip())
            else:
                self._found[result.key] = result

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Result | None:
        return self._found.get(key)

    def add(self, result: Result, cell: Cell, identity: Mapping[str, Any]) -> None:
        """Append, and return once it is on the disk. Raises ResultsError."""
        line = {
            **vars(result),
            "topology": cell.topology,
            "output": cell.shape.output,
            "concurrency": cell.shape.concurrency,
            "identity": identity,
        }
        text = json.dumps(line)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                # What an interruption has cut off must not take the next line with it.
                file.write(("\n" if self._cut else "") + text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResultsError(f"{self.path} cannot be written: {error.strerror}") from error
        self._cut = False
        self._found[result.key] = result

    def took(self) -> dict[str, list[float]]:
        """Seconds of the cells that have gone well, by name."""
        found: dict[str, list[float]] = {}
        for result in self._found.values():
            if result.ok:
                found.setdefault(result.cell, []).append(result.seconds)
        return found


@dataclass(frozen=True)
class Spread:
    """One figure over the rounds."""

    median: float
    least: float
    most: float
    rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values), len(values))

    @property
    def percent(self) -> float:
        """From least to most, of the median."""
        return 100 * (self.most - self.least) / self.median


def metrics(figures: Mapping[str, float | None], devices: int) -> dict[str, float]:
    """All of METRICS, those per device included; and accept_length where it was told."""
    found = {name: value for name in METRICS if (value := figures.get(name)) is not None}
    for name in ("req_per_s", "tokens_per_s"):
        found[f"{name}_per_device"] = found[name] / devices
    accept = figures.get("accept_length")
    return found if accept is None else found | {"accept_length": accept}


@dataclass(frozen=True)
class Summary:
    """One topology under one shape. rounds: metrics by number of the round."""

    topology: str
    shape: str
    output: int
    concurrency: int
    stands_for: tuple[int, int]
    devices: int
    rounds: Mapping[int, Mapping[str, float]]

    def spread(self, metric: str) -> Spread | None:
        values = [each[metric] for each in self.rounds.values() if metric in each]
        return Spread.of(values) if values else None


def summaries(done: Iterable[tuple[Cell, Result]]) -> list[Summary]:
    """Of all cells with figures, shape by shape."""
    found: dict[str, tuple[Cell, dict[int, dict[str, float]]]] = {}
    for cell, result in done:
        if result.figures is not None:
            found.setdefault(cell.name, (cell, {}))[1][cell.round] = metrics(result.figures, cell.devices)
    return [
        Summary(
            cell.topology,
            cell.shape.name,
            cell.shape.output,
            cell.shape.concurrency,
            cell.shape.stands_for,
            cell.devices,
            rounds,
        )
        for cell, rounds in found.values()
    ]


@dataclass(frozen=True)
class Question:
    """Two topologies and a figure that the seed sets against each other."""

    one: str
    other: str
    metric: str
    text: str


QUESTIONS = (
    Question("p2_d1", "mixed_tp2", "req_per_s", "requests per second, P2/D1 over mixed TP2"),
    Question("p2_d1", "mixed_tp2", "tpot_ms", "time per output token, P2/D1 over mixed TP2"),
    Question("p2_d1", "mixed_tp2", "e2e_ms", "end-to-end time, P2/D1 over mixed TP2"),
    Question("p2_d1", "p2_d2", "req_per_s", "requests per second, P2/D1 over P2/D2"),
    Question("p2_d1", "p2_d2", "req_per_s_per_device", "requests per second and device, P2/D1 over P2/D2"),
    Question("p2x2_d2", "p2_d2", "req_per_s", "requests per second, P2x2/D2 over P2/D2"),
    Question("p2x2_d2", "p2_d2", "e2e_ms", "end-to-end time, P2x2/D2 over P2/D2"),
)


class Verdict(StrEnum):
    """What may be said of a ratio."""

    HIGHER = "higher in every round"
    LOWER = "lower in every round"
    NONE = "rounds disagree, no difference shown"
    TOO_FEW = f"fewer than {CLAIM_ROUNDS} rounds, no claim"


@dataclass(frozen=True)
class Answer:
    """A ratio under one shape, over the rounds that have both sides, beside the seed's single one."""

    question: Question
    shape: str
    ratio: Spread
    seed: float | None

    @property
    def verdict(self) -> Verdict:
        if self.ratio.rounds < CLAIM_ROUNDS:
            return Verdict.TOO_FEW
        if self.ratio.least > 1:
            return Verdict.HIGHER
        return Verdict.LOWER if self.ratio.most < 1 else Verdict.NONE


def answers(found: Sequence[Summary], seed: Mapping[tuple[str, int, int], Mapping[str, float]]) -> list[Answer]:
    """To every question for which both topologies have a round in common."""
    by_name = {(each.topology, each.shape): each for each in found}
    result = []
    for question in QUESTIONS:
        for one in found:
            other = by_name.get((question.other, one.shape))
            if one.topology != question.one or other is None:
                continue
            ratios = [
                one.rounds[number][question.metric] / other.rounds[number][question.metric]
                for number in sorted(one.rounds.keys() & other.rounds.keys())
            ]
            if not ratios:
                continue
            theirs = [seed.get((name, *one.stands_for)) for name in (question.one, question.other)]
            seen = theirs[0][question.metric] / theirs[1][question.metric] if theirs[0] and theirs[1] else None
            result.append(Answer(question, one.shape, Spread.of(ratios), seen))
    return result
