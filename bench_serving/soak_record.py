"""What a soak has seen, and what it comes to: counts, faults, samples of every process. Pure: no processes, no sockets.

Three kinds of fault. Wrong: a byte or token, an end that nobody asked for, an error without a cause. Leak: something
that is held although nothing is under way, or memory that grows with the number of requests. Hang: what has not ended
within its limit.
"""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
GROWTH_BYTES = KIB
"""Of resident memory per request, over the second half of a process's life. What is kept for ended rooms on purpose, in
tables of up to 65,536 entries, takes up to half of that until they are full."""
GROWTH_NOISE = 4 * MIB
"""Growth over that half that says nothing: allocators keep what they once had, pages are 4 KiB."""
GROWTH_SAMPLES = 8
"""Fewer in that half are no line."""
MAX_FAULTS = 20
"""After so many a soak ends: the next ones would tell the same."""
RATE_SECONDS = 10.0
"""The rate of a progress line is that since the last sample that is older than this, or since the start."""


class Kind(StrEnum):
    WRONG = "wrong"
    LEAK = "leak"
    HANG = "hang"


PLURAL = {Kind.WRONG: "wrong", Kind.LEAK: "leaks", Kind.HANG: "hangs"}


@dataclass(frozen=True)
class Fault:
    """One thing that must not be. seconds: since the start; handoffs: requests that had been handed over by then."""

    kind: Kind
    seconds: float
    handoffs: int
    what: str


@dataclass(frozen=True)
class Restart:
    """A side that was killed and started again. lost: requests that ended with it; recovered: seconds from its new
    start until requests were served again."""

    seconds: float
    side: str
    lost: int
    recovered: float


@dataclass(frozen=True)
class Sample:
    """One process at one moment. life: how often its name has been started again. Units of staging: None where it has
    none, or does not tell."""

    seconds: float
    handoffs: int
    process: str
    life: int
    rss: int
    threads: int
    sockets: int
    units_free: int | None = None
    units_quarantined: int | None = None


@dataclass(frozen=True)
class Growth:
    """Of the resident memory of one life of a process, over the second half of what was seen of it."""

    process: str
    life: int
    handoffs: int
    """Requests of that half."""
    bytes_per_handoff: float
    """Slope of the least-squares line."""
    bytes: int

    @property
    def leaks(self) -> bool:
        return self.bytes_per_handoff > GROWTH_BYTES and self.bytes > GROWTH_NOISE


@dataclass(frozen=True)
class Goal:
    """When a soak has done enough: so many requests, or so many seconds."""

    handoffs: int | None = None
    seconds: float | None = None

    def reached(self, record: "Record") -> bool:
        if self.handoffs is not None and record.handoffs >= self.handoffs:
            return True
        return self.seconds is not None and record.seconds >= self.seconds

    def left(self, record: "Record") -> float | None:
        """Seconds; None as long as there is no rate."""
        if self.seconds is not None:
            return max(0.0, self.seconds - record.seconds)
        rate = record.handoffs / record.seconds if record.seconds else 0.0
        assert self.handoffs is not None
        return max(0, self.handoffs - record.handoffs) / rate if rate else None


@dataclass
class Record:
    """What has happened so far."""

    handoffs: int = 0
    """Requests that were sent, whatever became of them."""
    arrived: int = 0
    aborted: int = 0
    """Those that a client gave up and that ended for it."""
    lost: int = 0
    """Those that were under way on a side when it was killed, and failed."""
    restarts: list[Restart] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the reader of the summary should know: what was not looked at, and why."""
    started: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """All is up: time counts from now on."""
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def fault(self, kind: Kind, what: str) -> None:
        self.faults.append(Fault(kind, round(self.seconds, 1), self.handoffs, what))

    @property
    def hopeless(self) -> bool:
        return len(self.faults) >= MAX_FAULTS

    def count(self, kind: Kind) -> int:
        return sum(fault.kind is kind for fault in self.faults)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def growth(self) -> list[Growth]:
        """Of every life that was seen often enough to tell."""
        lives: dict[tuple[str, int], list[Sample]] = {}
        for sample in self.samples:
            lives.setdefault((sample.process, sample.life), []).append(sample)
        found = []
        for (process, life), seen in lives.items():
            late = seen[len(seen) // 2 :]
            span = late[-1].handoffs - late[0].handoffs
            if len(late) < GROWTH_SAMPLES or not span:
                continue
            line = statistics.linear_regression([each.handoffs for each in late], [each.rss for each in late])
            found.append(Growth(process, life, span, round(line.slope, 1), late[-1].rss - late[0].rss))
        return found

    def judge_memory(self) -> None:
        """Memory that grows with the requests is a leak."""
        for growth in self.growth():
            if growth.leaks:
                self.fault(
                    Kind.LEAK,
                    f"{growth.process}: resident memory has grown by {growth.bytes / MIB:.1f} MiB in the last "
                    f"{growth.handoffs:,} requests, {growth.bytes_per_handoff:.0f} bytes each; {GROWTH_BYTES} are "
                    "what noise may be",
                )

    def rates(self) -> list[tuple[float, float]]:
        """Requests per second between two moments at which samples were taken: (seconds, rate)."""
        return [
            (later[0], (later[1] - earlier[1]) / (later[0] - earlier[0]))
            for earlier, later in itertools.pairwise(self._moments)
            if later[0] > earlier[0]
        ]

    @property
    def _moments(self) -> list[tuple[float, int]]:
        """When samples were taken, and how many requests there had been."""
        return sorted({(sample.seconds, sample.handoffs) for sample in self.samples})

    def progress(self, goal: Goal) -> str:
        """One line for the terminal."""
        older = [each for each in self._moments if each[0] <= self.seconds - RATE_SECONDS]
        since, done = older[-1] if older else (0.0, 0)
        rate = (self.handoffs - done) / (self.seconds - since)
        of = f" of {goal.handoffs:,}" if goal.handoffs is not None else ""
        left = goal.left(self)
        rest = f", {duration(left)} left" if left is not None else ""
        faults = ", ".join(f"{self.count(kind)} {PLURAL[kind]}" for kind in Kind)
        return (
            f"{duration(self.seconds)}  {self.handoffs:,}{of}, {rate:.1f}/s{rest}; {self.aborted} aborted, "
            f"{len(self.restarts)} restarts, {self.lost} lost to them; {faults}"
        )

    @property
    def last_line(self) -> str:
        faults = ", ".join(f"{self.count(kind)} {PLURAL[kind]}" for kind in Kind)
        return f"{self.handoffs} handoffs, {self.aborted} aborted, {len(self.restarts)} restarts: {faults}"

    def summary(self) -> dict[str, Any]:
        """For the JSON file: everything but the samples."""
        return {
            "handoffs": self.handoffs,
            "arrived": self.arrived,
            "aborted": self.aborted,
            "lost": self.lost,
            "seconds": round(self.seconds, 1),
            "handoffs_per_second": round(self.handoffs / self.seconds, 2) if self.seconds else None,
            "restarts": [asdict(each) for each in self.restarts],
            **{PLURAL[kind]: self.count(kind) for kind in Kind},
            "faults": [asdict(each) for each in self.faults],
            "growth": [asdict(each) | {"leaks": each.leaks} for each in self.growth()],
            "notes": self.notes,
        }


class Books:
    """What each process holds when nothing is under way, and whether that is still so.

    exact: what must be as it was, such as free pages. at_most: what may be less, and more by so much: connections and
    threads that a pool opens when it first needs them.
    """

    def __init__(self, exact: Iterable[str], at_most: Mapping[str, int]) -> None:
        self._exact = tuple(exact)
        self._at_most = dict(at_most)
        self._start: dict[str, dict[str, int]] = {}
        self._allowed: Counter[tuple[str, str]] = Counter()

    def allow(self, process: str, name: str, more: int) -> None:
        """A process may hold so many more from now on."""
        self._allowed[process, name] += more

    def note(self, process: str, held: Mapping[str, int]) -> None:
        """The start values of a process; what starts under the same name later must come to the same."""
        self._start[process] = dict(held)
        self.restarted(process)

    def restarted(self, process: str) -> None:
        """It is allowed nothing any more but its slack."""
        for key in [key for key in self._allowed if key[0] == process]:
            del self._allowed[key]

    def missing(self, process: str, held: Mapping[str, int]) -> list[str]:
        """What is otherwise than at the start, a line each. A process without start values has none."""
        start = self._start.get(process)
        if start is None:
            return []
        found = [
            f"{process}: {name} {held.get(name)}, {start[name]} at the start"
            for name in self._exact
            if name in start and held.get(name) != start[name]
        ]
        return found + [
            f"{process}: {held[name]} {name}, {start[name]} at the start"
            for name, slack in self._at_most.items()
            if name in start and name in held and held[name] > start[name] + slack + self._allowed[process, name]
        ]


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1:02:03."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def told(reasons: Iterable[str], limit: int = 5) -> list[str]:
    """The most frequent of them, with their number."""
    return [f"{number} x {reason}" for reason, number in Counter(reasons).most_common(limit)]
