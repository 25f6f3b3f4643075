"""Runs the cells that have no result yet, one after the other; each on servers of its own."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_serving import matrix_client, matrix_data
from bench_serving.matrix_client import Load
from bench_serving.matrix_plan import Cell, Lengths, Scale, key, seconds_left, sized
from bench_serving.matrix_results import Result, Results
from bench_serving.matrix_start import Starter
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher.options import Options

HOPELESS = 3
"""So many failures in a row end the run: what follows would most likely fail the same way."""


def clock(seconds: float) -> str:
    """`1 h 5 min`, `12 min`, `40 s`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@dataclass
class Matrix:
    """What is to be measured, and with what. out: the folder of results, logs and data sets."""

    plan: Sequence[Cell]
    scale: Scale
    options: Options
    starter: Starter
    identity: Mapping[str, Any]
    results: Results
    out: Path
    say: Callable[[str], None]
    _sets: dict[tuple[str, Lengths], tuple[Path, list[int]]] = field(default_factory=dict)

    def key(self, cell: Cell) -> str:
        """Of the cell's result. Sizes that follow from the shape are part of it."""
        return key(self._identity(cell), cell)

    def _identity(self, cell: Cell) -> dict[str, Any]:
        room = sized(self.options, self.scale, cell.shape)
        return {**self.identity, "sizes": {"max_tokens": room.max_tokens, "max_requests": room.max_requests}}

    def result(self, cell: Cell) -> Result | None:
        return self.results.get(self.key(cell))

    def todo(self) -> list[Cell]:
        """Cells without figures: those that failed are tried again."""
        return [cell for cell in self.plan if (found := self.result(cell)) is None or not found.ok]

    def done(self) -> list[tuple[Cell, Result]]:
        return [(cell, found) for cell in self.plan if (found := self.result(cell)) is not None]

    def run(self) -> None:
        """All that is to do. A cell that fails is noted, and the next begins.

        Raises HeteroError when nothing seems to work.
        """
        todo = self.todo()
        failures = 0
        for number, cell in enumerate(todo):
            place = f"[{len(self.plan) - len(todo) + number + 1}/{len(self.plan)}]"
            self.say(f"{place} {cell.label}: begins{self._left(todo[number:])}")
            result = self._measure(cell)
            self.results.add(result, cell, self._identity(cell))
            if result.figures is None:
                failures += 1
                self.say(f"{place} {cell.label}: NO RESULT after {clock(result.seconds)}: {result.reason}")
            else:
                failures = 0
                self.say(
                    f"{place} {cell.label}: {result.figures['req_per_s']:.3f} requests/s, TTFT "
                    f"{result.figures['ttft_ms']:.0f} ms, TPOT {result.figures['tpot_ms']:.2f} ms, E2E "
                    f"{result.figures['e2e_ms']:.0f} ms; took {clock(result.seconds)}{self._left(todo[number + 1 :])}"
                )
            if failures == HOPELESS:
                raise HeteroError(
                    f"{HOPELESS} cells in a row have no result; what is done is kept. Repair what the last reason "
                    "names, then run the same command again"
                )

    def _left(self, todo: Sequence[Cell]) -> str:
        if not todo:
            return ""
        seconds = seconds_left(todo, self.results.took())
        return "" if seconds is None else f"; about {clock(seconds)} left for {len(todo)}"

    def _measure(self, cell: Cell) -> Result:
        started = time.monotonic()
        figures, reason = None, ""
        try:
            figures = self._figures(cell)
        except HeteroError as error:
            reason = str(error)
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        return Result(
            self.key(cell), cell.name, cell.round, figures, reason, round(time.monotonic() - started, 1), ended
        )

    def _figures(self, cell: Cell) -> dict[str, float | None]:
        folder = self.out / "logs" / cell.label
        options = replace(sized(self.options, self.scale, cell.shape), log_dir=folder)
        loads = self._loads(cell)
        with self.starter.servers(cell, options) as servers:
            found = matrix_client.run(
                loads,
                servers.url,
                self.starter.model,
                self.starter.tokenizer,
                folder,
                seconds=self.scale.minutes * 60,
                watch=servers.check,
                say=self.say,
            )
            figures = matrix_client.figures(found[-1])
            if figures["accept_length"] is None:
                figures["accept_length"] = servers.accept_length()
        return figures

    def _loads(self, cell: Cell) -> list[Load]:
        shape = cell.shape
        wanted = self.scale.lengths
        # Same lengths on average and at the ends, other prompts: as the seed's "warm-up of the same shape".
        warm_up = replace(wanted, count=shape.warm_ups, total=round(wanted.mean * shape.warm_ups))
        sets = {"warm-up": warm_up, "measured": wanted}
        return [
            Load(name, *self._set(name, each), output=shape.output, concurrency=shape.concurrency)
            for name, each in sets.items()
        ]

    def _set(self, name: str, wanted: Lengths) -> tuple[Path, list[int]]:
        """The file of a data set, and the lengths of its prompts; made once."""
        if (name, wanted) not in self._sets:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(self.starter.tokenizer), trust_remote_code=True)
            lengths = matrix_data.lengths(wanted)
            path = self.out / "data" / f"{name}-{wanted.count}.jsonl"
            matrix_data.write(path, matrix_data.prompts(lengths, lambda text: len(tokenizer.encode(text)), name))
            self._sets[name, wanted] = path, lengths
        return self._sets[name, wanted]
