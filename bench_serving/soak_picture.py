"""A soak as a picture: memory, staging units, threads and sockets, and the rate over time. Needs matplotlib (extra
`picture`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_serving.soak_record import MIB, Record, Sample
from sglang_hetero.errors import TraceError
from sglang_hetero.perf import canvas

WIDTH, HEIGHT, DPI = 13.0, 8.0, 130
INK, GRID, RESTART = "#1f2937", "#e5e7eb", "#dc2626"
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#7c3aed", "#0891b2", "#b45309", "#db2777", "#4b5563", "#65a30d", "#0f766e")
THIN = 0.9
TEXT = 8
MINUTE = 60
Lines = dict[str, list[list[Sample]]]


def draw(record: Record, path: Path) -> None:
    """Write a PNG with four panels; restarts are vertical lines. Raises TraceError without samples or matplotlib."""
    if not record.samples:
        raise TraceError("there are no samples to draw")
    figure = canvas.empty(WIDTH, HEIGHT, DPI)
    memory, units, held, rate = figure.subplots(2, 2).flat
    found = lines(record.samples)
    _plot(memory, found, lambda each: each.rss / MIB, "-")
    _title(memory, "resident memory, MiB")
    _plot(units, found, lambda each: each.units_free, "-")
    _plot(units, found, lambda each: each.units_quarantined, ":", label=False)
    _title(units, "staging units: free, and in quarantine (dotted)")
    _plot(held, found, lambda each: each.threads, "-")
    _plot(held, found, lambda each: each.sockets, ":", label=False)
    _title(held, "threads, and sockets (dotted)")
    rates = record.rates()
    rate.plot([at / MINUTE for at, _ in rates], [value for _, value in rates], color=INK, linewidth=THIN)
    _title(rate, "requests per second")
    for axes in (memory, units, held, rate):
        for restart in record.restarts:
            axes.axvline(restart.seconds / MINUTE, color=RESTART, linewidth=THIN, linestyle=(0, (2, 3)))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes", fontsize=TEXT)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=TEXT, frameon=False)
    figure.suptitle(f"{record.last_line}   (restarts: red lines)", fontsize=10, color=INK)
    figure.savefig(path, format="png")


def lines(samples: Sequence[Sample]) -> Lines:
    """By process: the samples of each of its lives, so that no line joins two of them."""
    found: dict[str, dict[int, list[Sample]]] = {}
    for sample in samples:
        found.setdefault(sample.process, {}).setdefault(sample.life, []).append(sample)
    return {process: list(lives.values()) for process, lives in found.items()}


def _plot(axes: Any, found: Lines, value: Callable[[Sample], float | None], style: str, *, label: bool = True) -> None:
    for number, (process, lives) in enumerate(found.items()):
        for life, samples in enumerate(lives):
            points = [(each.seconds / MINUTE, told) for each in samples if (told := value(each)) is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=COLOURS[number % len(COLOURS)],
                    linewidth=THIN,
                    label=process if label and not life else None,
                )


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=TEXT + 1, color=INK)
    axes.tick_params(labelsize=TEXT, colors=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
