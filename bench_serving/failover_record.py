"""What became of the requests while a prefill server or etcd was away, and whether what is promised was kept. Pure."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

SHOWN_ERRORS = 5
NOT_SEEN = "it did not come to that"
BIN_SECONDS = 5.0
"""Of the line of requests per second: a few requests each, so that it is no noise."""


class Phase(StrEnum):
    """Of a run, in this order."""

    QUIET = "quiet"
    WITHOUT = "one prefill is gone"
    STARTING = "it starts again"
    AFTER = "it is back"
    AWAY = "etcd is away"
    BACK = "etcd is back"
    LOST = "etcd is away, and loses its data"
    EMPTY = "etcd is back, empty"


OF_ETCD = (Phase.AWAY, Phase.BACK, Phase.LOST, Phase.EMPTY)


class Fate(StrEnum):
    """What became of a request."""

    OK = "ok"
    WRONG = "wrong"
    """Answered, with other tokens than the undivided model's."""
    REFUSED = "refused"
    """It failed before its client had a token."""
    BROKEN = "broken"
    """It failed after that."""


@dataclass(frozen=True)
class Request:
    """sent, ended: seconds since the start of the load. error: what its client was told."""

    sent: float
    ended: float
    fate: Fate
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


@dataclass(frozen=True)
class Mark:
    """A phase begins. retries: those of the router so far."""

    seconds: float
    phase: Phase
    retries: int


@dataclass(frozen=True)
class Span:
    """What a phase comes to. Requests belong to the phase in which they end. rate: those that are right, per second."""

    phase: Phase
    start: float
    seconds: float
    ok: int
    wrong: int
    refused: int
    broken: int
    retries: int
    rate: float
    median: float | None
    """Seconds of a request that is right; of the longest one below."""
    longest: float | None

    @property
    def failed(self) -> int:
        return self.refused + self.broken


@dataclass(frozen=True)
class Verdict:
    """One thing that is promised."""

    promise: str
    kept: bool
    seen: str

    @property
    def line(self) -> str:
        return f"{'kept' if self.kept else 'BROKEN'}: {self.promise}: {self.seen}"


@dataclass
class Record:
    """A run. met: requests that the prefill server had not answered when it was killed. missing, held: what is not as
    it was at the end, of the servers' records in etcd and of what they hold; None if it did not come to that."""

    requests: list[Request] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ended: float = 0.0
    retries: int = 0
    met: int = 0
    missing: list[str] | None = None
    held: list[str] | None = None
    complete: bool = False

    def spans(self) -> list[Span]:
        """One for each phase that has begun."""
        ends = [*((mark.seconds, mark.retries) for mark in self.marks[1:]), (self.ended, self.retries)]
        return [self._span(mark, *end) for mark, end in zip(self.marks, ends, strict=False)]

    def _span(self, mark: Mark, end: float, retries: int) -> Span:
        inside = [one for one in self.requests if mark.seconds <= one.ended < end]
        fates = Counter(one.fate for one in inside)
        right = sorted(one.seconds for one in inside if one.fate is Fate.OK)
        seconds = end - mark.seconds
        return Span(
            mark.phase,
            round(mark.seconds, 1),
            round(seconds, 1),
            fates[Fate.OK],
            fates[Fate.WRONG],
            fates[Fate.REFUSED],
            fates[Fate.BROKEN],
            retries - mark.retries,
            round(fates[Fate.OK] / seconds, 3) if seconds > 0 else 0.0,
            round(statistics.median(right), 2) if right else None,
            round(right[-1], 2) if right else None,
        )

    def ratios(self) -> dict[Phase, float]:
        """Requests per second of each phase, as a share of the quiet one's in the same run; empty without that."""
        spans = self.spans()
        quiet = next((one.rate for one in spans if one.phase is Phase.QUIET), 0.0)
        return {one.phase: round(one.rate / quiet, 2) for one in spans} if quiet else {}

    def rates(self) -> list[tuple[float, float]]:
        """Requests that are right, per second, in whole bins: (middle of the bin, rate)."""
        right = Counter(int(one.ended / BIN_SECONDS) for one in self.requests if one.fate is Fate.OK)
        return [((at + 0.5) * BIN_SECONDS, right[at] / BIN_SECONDS) for at in range(int(self.ended / BIN_SECONDS))]

    def verdicts(self, recovers: float) -> list[Verdict]:
        """recovers: which share of the quiet rate there must be when the prefill server is back."""
        spans = self.spans()
        fates = Counter(one.fate for one in self.requests)
        total = len(self.requests)
        during = [one for one in spans if one.phase in OF_ETCD]
        etcd = sum(one.failed + one.wrong for one in during)
        ratio = self.ratios().get(Phase.AFTER)
        again = sum(one.retries for one in spans if one.phase is Phase.WITHOUT)
        return [
            Verdict("the run is complete", self.complete, f"{len(spans)} of {len(Phase)} phases"),
            Verdict(
                "requests that had not begun were met by the kill",
                # Either alone may have another reason: one whose client has its answer already, a busy machine.
                min(self.met, again) > 0,
                f"{self.met} waited for that server, {again} were tried again then",
            ),
            _none(fates[Fate.WRONG], total, "no answer has other tokens than the undivided model's"),
            _none(fates[Fate.REFUSED], total, "no request fails that had not begun"),
            _none(fates[Fate.BROKEN], total, "no request fails that had begun"),
            Verdict(
                f"with the prefill server back there are at least {recovers:.0%} of the requests per second",
                ratio is not None and ratio >= recovers,
                NOT_SEEN if ratio is None else f"{ratio:.0%}",
            ),
            _none(etcd, sum(one.ok for one in during) + etcd, "nothing fails for want of etcd"),
            _empty(self.missing, "all servers are in etcd at the end", "they are"),
            _empty(self.held, "the servers hold nothing at the end", "they do not"),
        ]

    def errors(self) -> list[str]:
        """What clients were told, the most frequent first, with the number."""
        told = Counter(f"{one.fate}: {one.error}" for one in self.requests if one.fate is not Fate.OK)
        return [f"{number} x {text}" for text, number in told.most_common(SHOWN_ERRORS)]

    def summary(self, recovers: float) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "verdicts": [asdict(one) for one in self.verdicts(recovers)],
            "phases": [asdict(one) | {"failed": one.failed} for one in self.spans()],
            "ratios": self.ratios(),
            "errors": self.errors(),
            "rates": self.rates(),
            "requests": [asdict(one) for one in self.requests],
        }


def _none(count: int, total: int, promise: str) -> Verdict:
    return Verdict(promise, total > 0 and not count, f"{count} of {total}")


def _empty(found: list[str] | None, promise: str, good: str) -> Verdict:
    return Verdict(promise, found == [], NOT_SEEN if found is None else "; ".join(found) or good)


def table(spans: Sequence[Span], ratios: dict[Phase, float]) -> list[str]:
    """A line for each phase, for people."""
    rows = [("phase", "s", "ok", "wrong", "failed before", "after first token", "retries", "req/s", "of quiet")]
    rows += [
        (
            str(one.phase),
            f"{one.seconds:.0f}",
            *(str(value) for value in (one.ok, one.wrong, one.refused, one.broken, one.retries)),
            f"{one.rate:.2f}",
            f"{ratios[one.phase]:.0%}" if one.phase in ratios else "-",
        )
        for one in spans
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
