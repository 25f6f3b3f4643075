"""A trace as one file in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.

Four groups in this order: prefill ranks, link, decode merges, decode scheduler. A thread of a group is one rank, or one
pair of ranks on the link; where spans of it lie over each other, it goes on in further threads of the same name.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from sglang_hetero.errors import TraceError

from .parts import Event, Parts, counts, natural, whole
from .spans import Track

MICROSECOND = 1000
"""Nanoseconds."""
SAME_PASS = 0.5
"""Two requests' spans that share more than so much of the shorter one are of one forward pass: a rank computes one
batch at a time, and what the spans differ in is the time to tell."""


class Group(IntEnum):
    """Process ids of the output, in the order in which they are shown."""

    PREFILL = 1
    LINK = 2
    MERGES = 3
    SCHEDULER = 4


NAMES = {
    Group.PREFILL: "prefill ranks",
    Group.LINK: "link",
    Group.MERGES: "decode merges",
    Group.SCHEDULER: "decode scheduler",
}
GROUPS = {
    Track.FORWARD: Group.PREFILL,
    Track.LINK: Group.LINK,
    Track.MERGE: Group.MERGES,
    Track.SCHEDULER: Group.SCHEDULER,
    Track.WAIT: Group.SCHEDULER,
}


@dataclass(frozen=True)
class Lane:
    """A thread of the output: its spans follow each other."""

    group: Group
    name: str
    events: tuple[Event, ...]


def lane_name(event: Event) -> str:
    """Where an event is drawn, within its group."""
    rank = event.process.rank
    if event.track is Track.LINK:
        return f"{rank} -> {event.details.get('peer', '?')}"
    return f"{rank}, waits" if event.track is Track.WAIT else rank


def joined_passes(events: Iterable[Event]) -> list[Event]:
    """The same events, with one span for each forward pass: prefill tells of it once for each request in it."""
    found: list[Event] = []
    last: dict[str, int] = {}  # by rank, where its last pass is in `found`
    for event in events:
        rank = event.process.rank
        if event.track is not Track.FORWARD or event.took is None:
            found.append(event)
            continue
        before = found[last[rank]] if rank in last else None
        if before is not None and event.room not in before.rooms and _shared(before, event) > SAME_PASS:
            rooms = (*before.rooms, event.room)
            details = {"tokens": whole(before, "tokens") + whole(event, "tokens")}
            end = max(before.end, event.end)
            name = f"{len(rooms)} requests"
            found[last[rank]] = replace(before, name=name, took=end - before.at, details=details, rooms=rooms)
            continue
        last[rank] = len(found)
        found.append(event)
    return found


def _shared(one: Event, other: Event) -> float:
    shorter = min(one.took or 0, other.took or 0)
    return (min(one.end, other.end) - max(one.at, other.at)) / shorter if shorter else 0.0


def lanes(parts: Parts) -> list[Lane]:
    """All events, in the order in which they are shown: by group and name."""
    by_name: dict[tuple[Group, str], list[Event]] = {}
    for event in joined_passes(parts.events):
        by_name.setdefault((GROUPS[event.track], lane_name(event)), []).append(event)
    found: list[Lane] = []
    for group, name in sorted(by_name, key=lambda key: (key[0], natural(key[1]))):
        found += (Lane(group, name, tuple(events)) for events in _apart(by_name[group, name]))
    return found


def _apart(events: list[Event]) -> list[list[Event]]:
    """As few lists as possible in each of which no two spans overlap. events: by time. Instants go to the first one."""
    found: list[list[Event]] = [[]]
    free = [0]  # numbers of lists whose last span has ended
    busy: list[tuple[int, int]] = []  # end of the last span, number of its list
    for event in events:
        if event.took is None:
            found[0].append(event)
            continue
        while busy and busy[0][0] <= event.at:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(found))
            found.append([])
        number = heapq.heappop(free)
        found[number].append(event)
        heapq.heappush(busy, (event.end, number))
    return found


def chrome(parts: Parts) -> dict[str, Any]:
    """The trace as an object of Chrome's format; times in microseconds from the first event."""
    if not parts.events:
        raise TraceError("the trace has no events")
    zero = min(event.at for event in parts.events)
    entries: list[dict[str, Any]] = []
    for group, name in NAMES.items():
        entries.append(_meta("process_name", group, 0, name=name))
        entries.append(_meta("process_sort_index", group, 0, sort_index=int(group)))
    for number, lane in enumerate(lanes(parts), 1):
        entries.append(_meta("thread_name", lane.group, number, name=lane.name))
        entries.append(_meta("thread_sort_index", lane.group, number, sort_index=number))
        entries += (_entry(event, lane.group, number, zero) for event in lane.events)
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"start_unix_ns": str(zero), "bad_lines": parts.bad, "dropped_spans": parts.dropped},
    }


def _meta(what: str, group: Group, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": int(group), "tid": thread, "args": args}


def _entry(event: Event, group: Group, thread: int, zero: int) -> dict[str, Any]:
    # A room has more digits than a JavaScript number.
    args = {**event.details, "rank": event.process.rank, "rooms": " ".join(map(str, event.rooms))}
    entry: dict[str, Any] = {
        "name": event.name,
        "cat": str(event.track),
        "pid": int(group),
        "tid": thread,
        "ts": (event.at - zero) / MICROSECOND,
        "args": args,
    }
    if event.took is None:
        return entry | {"ph": "i", "s": "t"}
    return entry | {"ph": "X", "dur": event.took / MICROSECOND}


def write(parts: Parts, path: Path) -> None:
    """Write the file. Raises TraceError."""
    text = json.dumps(chrome(parts), allow_nan=False)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


@dataclass(frozen=True)
class Room:
    """A request in figures. tokens: of its prompt, 0 if no forward pass was followed. nbytes: written, by component.

    at: its first event. first_pass to first_response: nanoseconds of the wall clock, of the first or the last rank that
    says so; None where nobody does.
    """

    room: int
    at: int
    tokens: int
    nbytes: dict[str, int]
    first_pass: int | None
    prefill_ended: int | None
    first_byte: int | None
    last_byte: int | None
    first_response: int | None
    early: float | None
    """Share of the bytes whose write had ended when prefill had, at the rank that wrote them."""


def rooms(parts: Parts) -> list[Room]:
    """All requests, in the order of time."""
    by_room: dict[int, list[Event]] = {}
    for event in parts.events:
        by_room.setdefault(event.room, []).append(event)
    return [_room(room, events) for room, events in by_room.items()]


def _room(room: int, events: list[Event]) -> Room:
    passes = [event for event in events if event.track is Track.FORWARD and event.took is not None]
    writes = [event for event in events if event.track is Track.LINK and event.took is not None]
    ended = prefill_ends(events)
    tokens: dict[str, int] = {}
    for event in passes:
        tokens[event.process.rank] = tokens.get(event.process.rank, 0) + whole(event, "tokens")
    nbytes: dict[str, int] = {}
    early = 0
    for write_ in writes:
        for component, number in counts(write_, "bytes").items():
            nbytes[component] = nbytes.get(component, 0) + number
            early += number if write_.end <= ended.get(write_.process.rank, -1) else 0
    total = sum(nbytes.values())
    responses = [event.at for event in events if event.name == "first response"]
    return Room(
        room,
        min(event.at for event in events),
        max(tokens.values(), default=0),
        nbytes,
        min((event.at for event in passes), default=None),
        max(ended.values(), default=None),
        min((event.at for event in writes), default=None),
        max((event.end for event in writes), default=None),
        max(responses, default=None),
        early / total if total and ended else None,
    )


def prefill_ends(events: Iterable[Event]) -> dict[str, int]:
    """By rank when the prefill of one request ended: as SentRecord.prefill_ended."""
    told: dict[str, int] = {}
    handed: dict[str, int] = {}
    for event in events:
        if event.track is Track.FORWARD and event.name == "prefill ended":
            told[event.process.rank] = event.at
        elif event.track is Track.FORWARD and event.details.get("last") is True:
            handed.setdefault(event.process.rank, event.at)
    return handed | told
