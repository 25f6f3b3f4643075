"""A trace as a picture: a timeline with one lane per rank. Needs matplotlib (extra `picture`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_hetero.errors import TraceError

from . import canvas
from .parts import Event, Parts, counts, whole
from .perfetto import Group, Lane, lanes, rooms
from .records import Component
from .spans import Track

MILLISECOND = 1_000_000
"""Nanoseconds."""
MIB = 1 << 20

INK, PALE, GRID = "#1f2937", "#6b7280", "#e5e7eb"
PASSES = ("#cbd5e1", "#94a3b8")
"""Chunks take turns."""
COLOURS = {Component.KV: "#2563eb", Component.STATE: "#ea580c", Component.DRAFT: "#16a34a"}
READ, WAITING = "#a855f7", "#fde68a"
LABELS = {
    Component.KV: "attention KV",
    Component.STATE: "linear state (conv, SSM)",
    Component.DRAFT: "draft KV",
}
MARKS = {
    "prefill ended": "#dc2626",
    "FirstGeneration": "#7c3aed",
    "enqueue": "#0891b2",
    "first response": "#059669",
}
"""Instants that are lines through all lanes, in the picture of one request."""

WIDTH, LANE, REST = 15.0, 0.42, 2.3
"""Inches: of the picture, of a lane, of title, axis and legend together."""
MAX_HEIGHT = 60.0
DPI = 150
BAR = 0.76
"""Height of a bar, of its lane's."""
MARGIN = 0.01
"""Of the time axis, on both sides."""
TEXT = 7
"""Points."""
LETTERS = 180
"""So many of them, of that size, fill the time axis; what a bar has no room for is not written."""
THIN = 0.004
"""A bar that is shorter than this part of the axis gets an edge of its own colour, or it would be all edge."""


def draw(parts: Parts, path: Path, room: int | None = None) -> None:
    """Write a PNG of one request, or of all.

    Raises TraceError if there is nothing to draw, no matplotlib, or something that matplotlib cannot draw.
    """
    shown = parts if room is None else parts.of(room)
    if not shown.events:
        raise TraceError("the trace has no events")
    found = lanes(shown)
    figure = canvas.empty(WIDTH, min(MAX_HEIGHT, LANE * len(found) + REST), DPI)
    try:
        _fill(figure.add_subplot(), shown, found)
        figure.savefig(path, format="png")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except Exception as error:
        # A trace may come from anywhere, and matplotlib does not say what it raises for texts and figures it dislikes.
        said = " ".join(str(error).split())
        raise TraceError(f"matplotlib cannot draw this trace: {type(error).__name__}: {said}") from error


def _fill(axes: Any, shown: Parts, found: Sequence[Lane]) -> None:
    """The whole picture. Texts from files go without mathtext: a rank may be called anything."""
    zero = _zero(shown.events)
    start, end = _reach(shown.events, zero)
    for row, lane in enumerate(found):
        for event in lane.events:
            _bar(axes, row, event, zero, end - start)
    single = len(rooms(shown)) == 1
    if single:
        _marks(axes, shown.events, zero)
    _dress(axes, found, (start, end))
    _legend(axes, shown.events, marks=single)
    axes.set_title(_title(shown), loc="left", fontsize=11, color=INK)


def _zero(events: Sequence[Event]) -> int:
    """The start of the first forward pass; where none was followed, the first event."""
    passes = [event.at for event in events if event.track is Track.FORWARD and event.took is not None]
    return min(passes) if passes else min(event.at for event in events)


def _ms(nanoseconds: int) -> float:
    return nanoseconds / MILLISECOND


def _reach(events: Iterable[Event], zero: int) -> tuple[float, float]:
    """First and last moment in milliseconds. A wait for memory may begin long before anything else: it is cut."""
    drawn = [event for event in events if event.track is not Track.WAIT] or list(events)
    start = min([_ms(event.at - zero) for event in drawn] + [0.0])
    end = max(_ms(event.end - zero) for event in drawn)
    margin = (end - start or 1.0) * MARGIN
    return start - margin, end + margin


def _bar(axes: Any, row: int, event: Event, zero: int, width: float) -> None:
    at, took = _ms(event.at - zero), _ms(event.took or 0)
    if event.took is None:
        if event.name not in MARKS:
            axes.plot([at], [row], marker="|", markersize=9, color=PALE, zorder=4)
        return
    bottom = row - BAR / 2
    for colour, share in _colours(event):
        edge = (
            {"edgecolors": colour, "linewidth": 0.8} if took < width * THIN else {"edgecolors": INK, "linewidth": 0.25}
        )
        axes.broken_barh([(at, took)], (bottom, BAR * share), facecolors=colour, **edge)
        bottom += BAR * share
    for text in _texts(event):
        if took * LETTERS > width * len(text):
            place: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
            axes.text(at + took / 2, row, text, fontsize=TEXT, color=INK, parse_math=False, **place)
            break


def _colours(event: Event) -> list[tuple[str, float]]:
    """What a bar is filled with, and which part of its height."""
    if event.track is Track.FORWARD:
        return [(PASSES[whole(event, "chunk") % len(PASSES)], 1.0)]
    if event.track is Track.WAIT:
        return [(WAITING, 1.0)]
    if event.track is Track.LINK:
        nbytes = counts(event, "bytes")
        parts = [(COLOURS[component], nbytes.get(component, 0)) for component in Component]
        total = sum(number for _, number in parts)
        return [(colour, number / total) for colour, number in parts if number] or [(PALE, 1.0)]
    for component in Component:
        if event.name == f"merge {component}":
            return [(COLOURS[component], 1.0)]
    return [(READ if event.name == "read" else PALE, 1.0)]


def _texts(event: Event) -> tuple[str, ...]:
    """What may be written into a bar, the longest first."""
    if event.track is Track.FORWARD:
        return f"{event.name}: {whole(event, 'tokens'):,} tokens", event.name, event.name.rsplit(" ", 1)[-1]
    return (event.name,) if event.track is Track.WAIT else ()


def _marks(axes: Any, events: Iterable[Event], zero: int) -> None:
    """A line for the last time that each of the moments was told."""
    for name, colour in MARKS.items():
        times = [_ms(event.at - zero) for event in events if event.name == name and event.took is None]
        if times:
            axes.axvline(max(times), color=colour, linewidth=1.3, linestyle=(0, (4, 2)), zorder=5)


def _dress(axes: Any, found: Sequence[Lane], reach: tuple[float, float]) -> None:
    titles = {Group.PREFILL: "", Group.LINK: "", Group.MERGES: "merges, ", Group.SCHEDULER: "scheduler, "}
    names, previous = [], ""
    for lane in found:
        name = f"{titles[lane.group]}{lane.name}"
        names.append("" if name == previous else name)
        previous = name
    axes.set_yticks(range(len(found)), names, fontsize=8, color=INK, parse_math=False)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(*reach)
    for row in range(1, len(found)):
        if found[row].group is not found[row - 1].group:
            axes.axhline(row - 0.5, color=PALE, linewidth=0.8)
    axes.set_xlabel("ms from the start of the first forward pass", fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(axes: Any, events: Sequence[Event], *, marks: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=PASSES[0], edgecolor=INK, linewidth=0.25, label="forward pass")]
    handles += [Patch(facecolor=colour, label=LABELS[component]) for component, colour in COLOURS.items()]
    if any(event.name == "read" for event in events):
        handles.append(Patch(facecolor=READ, label="read by decode"))
    handles.append(Patch(facecolor=WAITING, edgecolor=INK, linewidth=0.25, label="waiting"))
    told = {event.name for event in events}
    handles += [
        Line2D([], [], color=colour, linewidth=1.3, linestyle=(0, (4, 2)), label=name)
        for name, colour in MARKS.items()
        if marks and name in told
    ]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _title(parts: Parts) -> str:
    found = rooms(parts)
    total = sum(sum(each.nbytes.values()) for each in found)
    if len(found) > 1:
        return f"{len(found)} requests, {total / MIB:,.1f} MiB written"
    (only,) = found
    texts = [f"room {only.room}"]
    if only.tokens:
        texts.append(f"{only.tokens:,} tokens")
    if total:
        texts.append(f"{total / MIB:,.1f} MiB written")
    if only.early is not None:
        texts.append(f"{only.early:.0%} before prefill ended")
    return ", ".join(texts)
