"""The files of a trace, read back. They may come from anywhere: what is not right is counted, named and left out.

spans.py writes them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sglang_hetero.errors import TraceError

from .spans import SUFFIX, VERSION, Track

SIDES = ("prefill", "decode")
MAX_LINE = 1 << 16
"""Bytes; ours have some 300."""
MAX_FILES = 1 << 12
MAX_EVENTS = 2_000_000
"""Of a folder; a gigabyte or so in memory."""
MAX_TEXT = 200
MAX_DETAILS = 32
MAX_NUMBER = (1 << 63) - 1
"""Of nanoseconds, bytes and rooms, which SGLang draws from 63 bits."""
SHOWN = 10
"""Bad lines that are named; the rest is counted."""


@dataclass(frozen=True)
class Process:
    """Who wrote a file. start: nanoseconds of the wall clock."""

    side: str
    rank: str
    pid: int
    start: int


@dataclass(frozen=True)
class Event:
    """A span, or an instant where `took` is None. at, took: nanoseconds, at of the wall clock."""

    process: Process
    track: Track
    name: str
    at: int
    took: int | None
    room: int
    details: dict[str, Any] = field(default_factory=dict)
    rooms: tuple[int, ...] = ()
    """All rooms of a forward pass, once perfetto.joined_passes has put the spans of its requests together."""

    def __post_init__(self) -> None:
        if not self.rooms:
            object.__setattr__(self, "rooms", (self.room,))

    @property
    def end(self) -> int:
        return self.at + (self.took or 0)


@dataclass
class Parts:
    """All files of a folder. bad: lines that were left out. dropped: spans that the ranks had no room for."""

    processes: list[Process] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    bad: int = 0
    problems: list[str] = field(default_factory=list)
    dropped: int = 0

    def of(self, room: int) -> Parts:
        """The same for one request. Raises TraceError if there is nothing of it."""
        events = [event for event in self.events if event.room == room]
        if not events:
            raise TraceError(f"the trace has nothing of room {room}; --list shows the rooms")
        return Parts(self.processes, events, self.bad, self.problems, self.dropped)

    def refuse(self, where: str, why: object) -> None:
        """Leave a line out."""
        self.bad += 1
        if len(self.problems) < SHOWN:
            self.problems.append(f"{where}: {why}")


def read(directory: Path) -> Parts:
    """The trace in a folder, events in the order of time. Raises TraceError if there is none at all."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except OSError as error:
        raise TraceError(f"{directory}: {error.strerror}") from error
    if not paths:
        raise TraceError(f"{directory} has no trace (files *{SUFFIX}); servers write it with SGLANG_HETERO_TRACE")
    if len(paths) > MAX_FILES:
        raise TraceError(f"{directory} has {len(paths)} trace files, more than {MAX_FILES}")
    parts = Parts()
    for path in paths:
        if not path.is_file():  # a pipe would block
            parts.refuse(_printable(path.name), "it is no file")
            continue
        try:
            with path.open("rb") as file:
                _read_file(_printable(path.name), file, parts)
        except OSError as error:
            parts.refuse(_printable(path.name), error.strerror)
    parts.events.sort(key=lambda event: (event.at, -(event.took or 0)))
    return parts


def _read_file(name: str, file: BinaryIO, parts: Parts) -> None:
    process: Process | None = None
    for number, line in _lines(file):
        where = f"{name}:{number}"
        try:
            if line is None:
                raise ValueError(f"the line is longer than {MAX_LINE} bytes")
            said = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(said, dict):
                raise ValueError("it is no object")
            if "version" in said:
                process = _process(said)
                parts.processes.append(process)
            elif process is None:
                parts.refuse(where, "the first line does not say who wrote the file")
                return
            elif "dropped" in said:
                parts.dropped += _number(said, "dropped")
            elif len(parts.events) >= MAX_EVENTS:
                parts.refuse(where, f"there are more than {MAX_EVENTS} events")
                return
            else:
                parts.events.append(_event(process, said))
        except (ValueError, RecursionError) as error:
            parts.refuse(where, error)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Number and content of each line; None for one that is too long, of which no more is kept than that."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) <= MAX_LINE:
            if line.strip():
                yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)
        yield number, None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _text(said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT:
        raise ValueError(f"{key} must be a text of 1 to {MAX_TEXT} characters")
    return _printable(value)


def _number(said: dict[str, Any], key: str) -> int:
    value = said.get(key)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{key} must be a whole number from 0 to {MAX_NUMBER}")
    return value


def _process(said: dict[str, Any]) -> Process:
    if said["version"] != VERSION:
        raise ValueError(f"version {str(said['version'])[:MAX_TEXT]!r}, known is {VERSION}")
    side = _text(said, "side")
    if side not in SIDES:
        raise ValueError(f"side must be {' or '.join(SIDES)}")
    return Process(side, _text(said, "rank"), _number(said, "pid"), _number(said, "start"))


def _event(process: Process, said: dict[str, Any]) -> Event:
    track = _text(said, "track")
    if track not in list(Track):
        raise ValueError(f"there is no track {track!r}")
    details = said.get("details", {})
    if not isinstance(details, dict) or len(details) > MAX_DETAILS:
        raise ValueError(f"details must be an object of at most {MAX_DETAILS} entries")
    took = _number(said, "took") if "took" in said else None
    event = Event(
        process,
        Track(track),
        _text(said, "name"),
        _number(said, "at"),
        took,
        _number(said, "room"),
        {_printable(key[:MAX_TEXT]): _detail(key, value) for key, value in details.items()},
    )
    if event.end > MAX_NUMBER:
        raise ValueError("its end is beyond all time")
    return event


def _detail(key: str, value: Any, deep: bool = False) -> Any:
    """A scalar, or numbers by name."""
    if isinstance(value, str):
        return _printable(value[:MAX_TEXT])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= MAX_NUMBER:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, dict) and not deep and len(value) <= MAX_DETAILS:
        return {_printable(name[:MAX_TEXT]): _detail(name, number, deep=True) for name, number in value.items()}
    raise ValueError(f"detail {_printable(key[:MAX_TEXT])!r} is no number or text")


def counts(event: Event, key: str) -> dict[str, int]:
    """A detail that has numbers by component, for example the bytes of a write; empty where it is something else."""
    value = event.details.get(key)
    if not isinstance(value, dict):
        return {}
    return {name: number for name, number in value.items() if type(number) is int and number >= 0}


def whole(event: Event, key: str) -> int:
    """A detail that is a whole number; 0 where it is something else."""
    value = event.details.get(key)
    return value if type(value) is int else 0


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts TP2 before TP10."""
    return [
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)
    ]


def where(parts: Parts) -> str:
    """What a person should know of the lines that were left out, or an empty text."""
    texts = []
    if parts.bad:
        texts.append(f"{parts.bad} bad lines left out: " + "; ".join(parts.problems))
    if parts.dropped:
        texts.append(f"{parts.dropped} spans were dropped by the ranks, for lack of memory or because a file was full")
    return os.linesep.join(texts)
