"""A failover run as a picture: requests per second over time, and every request. Needs matplotlib (extra `picture`)."""

from pathlib import Path

from bench_serving.failover_record import Fate, Phase, Record
from bench_serving.soak_picture import DPI, GRID, INK, RESTART, TEXT, THIN
from sglang_hetero.errors import TraceError
from sglang_hetero.perf import canvas

WIDTH, HEIGHT = 13.0, 7.0
COLOUR = {Fate.OK: "#2563eb", Fate.WRONG: "#7c3aed", Fate.REFUSED: "#dc2626", Fate.BROKEN: "#ea580c"}
LABEL = {
    Fate.OK: "answered, right tokens",
    Fate.WRONG: "wrong tokens",
    Fate.REFUSED: "failed before its first token",
    Fate.BROKEN: "failed after its first token",
}
NAMES_ROOM = 1.8
"""Height of the upper panel over its highest line: the names of the phases stand there."""
SHADED = {Phase.WITHOUT: "#fee2e2", Phase.STARTING: "#fef3c7", Phase.AWAY: "#e0e7ff", Phase.LOST: "#e0e7ff"}
"""Phases in which somebody is away."""


def draw(record: Record, title: str, path: Path) -> None:
    """Write a PNG with two panels. Raises TraceError without requests or matplotlib."""
    if not record.requests:
        raise TraceError("there are no requests to draw")
    figure = canvas.empty(WIDTH, HEIGHT, DPI)
    rate, each = figure.subplots(2, 1, sharex=True)
    rates = record.rates()
    rate.step([at for at, _ in rates], [value for _, value in rates], where="mid", color=INK, linewidth=THIN)
    rate.set_title("requests answered per second", loc="left", fontsize=TEXT + 1, color=INK)
    for fate in Fate:
        found = [one for one in record.requests if one.fate is fate]
        each.scatter(
            [one.ended for one in found],
            [one.seconds for one in found],
            s=7,
            color=COLOUR[fate],
            linewidths=0,
            label=f"{LABEL[fate]}: {len(found)}",
            zorder=2 if fate is Fate.OK else 3,
        )
    each.set_title("every request: seconds it took, at its end", loc="left", fontsize=TEXT + 1, color=INK)
    for span in record.spans():
        for axes in (rate, each):
            axes.axvline(span.start, color=RESTART, linewidth=THIN, linestyle=(0, (2, 3)))
            if span.phase in SHADED:
                axes.axvspan(span.start, span.start + span.seconds, color=SHADED[span.phase], zorder=0)
        share = record.ratios().get(span.phase)
        # Upright: a phase may be much shorter than its name.
        rate.annotate(
            f"{span.phase}\n{span.rate:.2f}/s" + (f", {share:.0%}" if share is not None else ""),
            (span.start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -3),
            textcoords="offset points",
            rotation=90,
            verticalalignment="top",
            fontsize=TEXT - 1,
            color=INK,
        )
    for axes in (rate, each):
        axes.tick_params(labelsize=TEXT, colors=INK)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, record.ended)
    rate.set_ylim(0, rate.get_ylim()[1] * NAMES_ROOM)
    each.set_xlabel("seconds", fontsize=TEXT)
    figure.legend(*each.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=TEXT, frameon=False)
    figure.suptitle(title, fontsize=10, color=INK)
    figure.savefig(path, format="png")
