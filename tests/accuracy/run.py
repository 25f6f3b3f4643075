"""Rows of the table on real servers: each fleet is started once, and asked for all of its rows that are missing."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import sglang_hetero
from bench_serving.matrix_run import clock
from sglang_hetero import models
from sglang_hetero.accuracy.recall import Question
from sglang_hetero.errors import HeteroError
from sglang_hetero.launcher import topology
from sglang_hetero.launcher.fleet import Fleet
from sglang_hetero.launcher.options import Options
from sglang_hetero.layout.window import ConvLayout

from .ask import Sheet, ask
from .faults import Injection, MergeFault, faults
from .plan import Row, fleets
from .record import Records, RowRecord

SETTINGS = Options(mtp=3, page_size=64, chunk=256, start_seconds=1500.0)
"""A prompt of 512 tokens is prefilled in two chunks. A start may take long: on a busy machine, a table waits."""
MOVED_BY = ("backend", "cpu", "layout", "merge", "reshard", "transfer")
"""Parts of the package that answers depend on."""
PROGRESS_SECONDS = 20.0
START_SECONDS = 60.0
"""Taken for a fleet's start as long as none has been seen."""


class NotHit(HeteroError):
    """The hook was not in place, or met nothing."""


def source_digest() -> str:
    """Of the code that moves state."""
    root = Path(sglang_hetero.__file__).parent
    digest = hashlib.sha256()
    for part in MOVED_BY:
        for file in sorted((root / part).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@dataclass
class Table:
    """All rows of one model and sheet of questions. say: prints a line of progress."""

    rows: Sequence[Row]
    model: str
    sheet: Sheet
    records: Records
    out: Path
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.questions: list[Question] = self.sheet.questions()
        self.faults: dict[str, MergeFault] = faults(models.spec(self.model))
        self._model, self._digest = models.fingerprint(self.model), source_digest()
        self._starts: list[float] = []

    def key(self, row: Row) -> str:
        """Of all that a row's answers depend on."""
        told = {
            "row": asdict(row),
            "fault": asdict(self.faults[row.fault]) if row.fault else None,
            "model": self._model,
            "questions": [question.prompt for question in self.questions],
            "tokens": self.sheet.tokens,
            "settings": [SETTINGS.mtp, SETTINGS.page_size, SETTINGS.chunk],
            "code": self._digest,
            "versions": [metadata.version(package) for package in ("sglang", "torch", "transformers")],
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def record(self, row: Row) -> RowRecord | None:
        """What is known of a row."""
        return self.records.get(self.key(row))

    def todo(self) -> list[Row]:
        return [row for row in self.rows if self.record(row) is None]

    def run(self) -> None:
        """All that is to do. Raises HeteroError at the first failure; what was done is kept."""
        for name in dict.fromkeys(row.topology for row in self.rows):
            topology.parse(name).check_model(models.spec(self.model))
        todo = self.todo()
        self.say(f"{len(self.rows) - len(todo)} of {len(self.rows)} rows are done{self._left(todo)}")
        for together in fleets(todo):
            self._run_fleet(together)

    def _run_fleet(self, together: Sequence[Row]) -> None:
        first = together[0]
        folder = self.out / "logs" / "-".join([first.topology, first.conv_layout, *(["broken"] if first.fault else [])])
        options = replace(
            SETTINGS, model=self.model, conv_layout=ConvLayout(first.conv_layout), log_dir=folder / "servers"
        )
        injection = Injection(folder) if first.fault else None
        if injection is not None:
            injection.choose(self.faults["control"])  # there is an order before the first request, a warm-up, comes
            options = replace(options, decode_env=injection.environment)
        started = time.monotonic()
        with Fleet(topology.parse(first.topology), options, say=lambda _: None) as fleet:
            self._starts.append(time.monotonic() - started)
            self.say(f"{first.topology}: started in {clock(self._starts[-1])}")
            if (models.fingerprint(self.model), source_digest()) != (self._model, self._digest):
                raise HeteroError(
                    f"model {self.model} or the code that moves state has changed meanwhile: run it again"
                )
            for row in together:
                self._run_row(row, fleet.url, injection)
                fleet.check()

    def _run_row(self, row: Row, url: str, injection: Injection | None) -> None:
        fault = self.faults[row.fault] if row.fault else None
        if injection is not None and fault is not None:
            injection.choose(fault)
        started = shown = time.monotonic()

        def done(count: int) -> None:
            nonlocal shown
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                left = (shown - started) / count * (len(self.questions) - count)
                self.say(f"  {row.name}: {count} of {len(self.questions)}, {clock(left)} left")

        answers = tuple(ask(url, self.questions, self.sheet.tokens, done))
        merged, hit = injection.hit(fault) if injection is not None and fault is not None else (0, 0)
        if fault is not None:
            check_hits(row.name, fault, len(answers), merged, hit)
        record = RowRecord(
            row.name,
            self.key(row),
            tuple(question.depth for question in self.questions),
            answers,
            merged,
            hit,
            round(time.monotonic() - started, 1),
        )
        self.records.add(record)
        right = sum(answer.right for answer in answers)
        self.say(f"{row.name}: {right} of {len(answers)} right, {clock(record.seconds)}{self._left(self.todo())}")

    def _left(self, todo: Iterable[Row]) -> str:
        groups = fleets(todo)
        seconds = self.records.seconds()
        if not groups or not seconds:
            return ""
        start = sum(self._starts) / len(self._starts) if self._starts else START_SECONDS
        each = sum(seconds) / len(seconds)
        return f"; about {clock(sum(start + len(rows) * each for rows in groups))} left"


def check_hits(row: str, fault: MergeFault, asked: int, merged: int, hit: int) -> None:
    """Raise NotHit unless every request was met by the hook, and changed by it if the fault changes anything."""
    wanted = 0 if fault.harmless else asked
    if merged != asked or hit != wanted:
        raise NotHit(
            f"{row}: {asked} requests were asked, the hook has met {merged} and changed {hit} of them where {wanted} "
            "should have been: these answers say nothing about the fault; look for MERGE_FAULTS or merge_faults in the "
            "log of the decode server"
        )
