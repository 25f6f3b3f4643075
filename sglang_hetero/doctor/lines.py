"""One thing that was looked at, and how it stands: what `doctor` and `validate` print and write. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec


class Status(StrEnum):
    """How a line stands. Only `fail` makes a command end with another exit status than 0."""

    OK = "ok"
    WARN = "warn"
    """It works, and there is something to know or to do."""
    FAIL = "fail"
    SKIP = "skip"
    """It was not looked at; the line says why."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """area: what it belongs to. name: of the line, once in its area. seen: what was seen, one line of text. remedy:
    what to do about it; of every `warn` and `fail`. figures: what was measured; a name ends with its unit.

    Raises ValueError for a line without words, or without a remedy where there must be one.
    """

    area: str
    name: str
    status: Status
    seen: str
    remedy: str = ""
    figures: dict[str, float] = {}

    def __post_init__(self) -> None:
        for part in ("area", "name", "seen", "remedy"):
            text = getattr(self, part)
            if not (text or part == "remedy") or not (text.isprintable() or not text):
                raise ValueError(f"{part} of a line is {text[:80]!r}, must be one line of text")
        if self.status in (Status.WARN, Status.FAIL) and not self.remedy:
            raise ValueError(f"{self.area}, {self.name}: a line that says {self.status} needs a remedy")


def ok(area: str, name: str, seen: str, **figures: float) -> Line:
    """A line that is as it should be."""
    return Line(area=area, name=name, status=Status.OK, seen=one_line(seen), figures=figures)


def warn(area: str, name: str, seen: str, remedy: str, **figures: float) -> Line:
    """A line with something to know or to do."""
    return Line(area=area, name=name, status=Status.WARN, seen=one_line(seen), remedy=one_line(remedy), figures=figures)


def fail(area: str, name: str, seen: str, remedy: str, **figures: float) -> Line:
    """A line that is wrong."""
    return Line(area=area, name=name, status=Status.FAIL, seen=one_line(seen), remedy=one_line(remedy), figures=figures)


def skip(area: str, name: str, why: str, remedy: str = "") -> Line:
    """A line that was not looked at."""
    return Line(area=area, name=name, status=Status.SKIP, seen=one_line(why), remedy=one_line(remedy))


def one_line(text: str) -> str:
    """The text in one line, whatever was in it; what cannot be printed is written as Python would."""
    joined = " ".join(text.split())
    return joined if joined.isprintable() else ascii(joined)[1:-1]


def failed(lines: Iterable[Line]) -> bool:
    """Whether any line fails."""
    return any(line.status is Status.FAIL for line in lines)


def summary(lines: Iterable[Line]) -> str:
    """How many there are of each status, for example `12 ok, 1 warn, 0 fail, 2 skip`."""
    counts = Counter(line.status for line in lines)
    return ", ".join(f"{counts[status]} {status}" for status in Status)


def text(line: Line) -> str:
    """A line for a terminal; its remedy stands in a second one."""
    found = f"{line.status:<4}  {line.area}, {line.name}: {line.seen}"
    return f"{found}\n      -> {line.remedy}" if line.remedy else found


def as_json(lines: Sequence[Line], **more: object) -> bytes:
    """All lines as JSON, with a summary by status, and whatever else belongs to them."""
    counts = Counter(line.status for line in lines)
    body = {
        "ok": not failed(lines),
        "counts": {str(status): counts[status] for status in Status},
        **more,
        "lines": list(lines),
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n"
