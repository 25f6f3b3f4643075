"""What one fault did at one topology, and how results are written down: a JSON line each. Plain data, no SGLang."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """Where a fault was tried."""

    HARNESS = "harness"
    """Real managers, pools and queues with every byte compared; no model, no HTTP."""
    SERVER = "server"
    """Whole servers with a model, their answers compared token by token."""


class Verdict(StrEnum):
    """What the result of a fault comes to; the first of these that holds."""

    HUNG = "hung"
    WRONG = "wrong"
    LEAKED = "leaked"
    SKIPPED = "skipped"
    RIGHT = "right"


@dataclass(frozen=True)
class FaultResult:
    """One fault at one step and topology, which are its name in `--only` and in the table, unique within a run."""

    fault: str
    """Its name: what happens and to whom, e.g. `kill -9 of a prefill rank`."""
    step: str
    """Where in a request's way it strikes, e.g. `mid-push`."""
    topology: str
    """TP sizes and, where it matters, the mode: `P2D1`, `P2D1 pull`."""
    kind: Kind
    expectation: str
    """What must become of the affected requests, in words, e.g. `decode fails within 5 s and names the rank`."""
    seconds: float | None = None
    """From the fault until the last affected request had failed or arrived; None where none was affected."""
    error: str = ""
    """What the client, decode and prefill were told: a text that shows the cause; empty if nothing failed."""
    recovered: float | None = None
    """Seconds that fresh requests took afterwards, at once after a restart; None where none was sent."""
    wrong: tuple[str, ...] = ()
    """What is otherwise than it must be, a line each: bytes, tokens, an end that nobody expected, an error that does
    not name the cause, a fresh request that failed."""
    leaked: tuple[str, ...] = ()
    """What is not back at its start value on a living rank, a line each: pages, slots, aux rows, units, threads,
    sockets, and what check_integrity() says."""
    hung: str = ""
    """Which request or process had not ended within its limit; empty if none."""
    skipped: str = ""
    """Why the fault could not be tried here, e.g. `needs CAP_NET_ADMIN`; empty if it was."""

    @property
    def name(self) -> str:
        """Fault, step and topology."""
        return name(self.fault, self.step, self.topology)

    @property
    def verdict(self) -> Verdict:
        if self.hung:
            return Verdict.HUNG
        if self.wrong:
            return Verdict.WRONG
        if self.leaked:
            return Verdict.LEAKED
        return Verdict.SKIPPED if self.skipped else Verdict.RIGHT

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def but(self, **changes: object) -> "FaultResult":
        """The same with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]  # dataclasses.replace checks the names


def read_line(text: str) -> FaultResult:
    """The result that a line of JSON holds. Raises ValueError for anything else."""
    try:
        values = json.loads(text)
        unknown = set(values) - {field.name for field in fields(FaultResult)}
        if unknown:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        values["kind"] = Kind(values["kind"])
        for name in ("wrong", "leaked"):
            values[name] = tuple(values.get(name, ()))
        return FaultResult(**values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no result of a fault: {text[:200]!r}: {error}") from None


def read(path: Path) -> list[FaultResult]:
    """All results of a file with one JSON line each. Raises ValueError with the line's number for a bad one."""
    found = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(read_line(text))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return found


def name(fault: str, step: str, topology: str) -> str:
    """How a fault is called in `--only`, in progress and by the test of the table."""
    return f"{fault}, {step} [{topology}]"


class Recorder:
    """Writes results to a file as they come, in the place of earlier ones of the same name; the others stay.

    So a run that is stopped leaves what it has found, and one that tries a part brings the rest up to date.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the file is there and holds something else."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._results = {result.name: result for result in read(path)} if path.exists() else {}

    def add(self, result: FaultResult) -> None:
        """One more."""
        self._results[result.name] = result
        new = self._path.with_suffix(".new")
        new.write_text("".join(each.line() + "\n" for each in self._results.values()))
        new.replace(self._path)


def summary(results: Iterable[FaultResult]) -> str:
    """`N faults, 0 wrong, 0 leaked, 0 hung`: how many were tried, and how many of them were not right, and how.

    One that is more than one of these counts in each.
    """
    tried = [result for result in results if result.verdict is not Verdict.SKIPPED]
    wrong = sum(bool(result.wrong) for result in tried)
    leaked = sum(bool(result.leaked) for result in tried)
    hung = sum(bool(result.hung) for result in tried)
    return f"{len(tried)} faults, {wrong} wrong, {leaked} leaked, {hung} hung"


def complaints(result: FaultResult) -> Iterator[str]:
    """Everything that is not as it must be, a line each."""
    if result.hung:
        yield f"hung: {result.hung}"
    yield from (f"wrong: {text}" for text in result.wrong)
    yield from (f"leaked: {text}" for text in result.leaked)
    if result.skipped:
        yield f"SKIPPED: {result.skipped}"
