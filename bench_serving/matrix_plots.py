"""The plots of a matrix's report: ours on the left, the seed's on the right. The only part that needs matplotlib."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_serving.matrix_results import Spread
from sglang_hetero.errors import HeteroError
from sglang_hetero.perf.picture import GRID, INK, PALE

COLOURS = {
    "mixed_tp2": "#cbd5e1",
    "mixed_tp4": "#64748b",
    "p2_d1": "#ea580c",
    "p2_d2": "#2563eb",
    "p2x2_d2": "#16a34a",
}
"""The undivided servers are grey, the pair with unequal TP sizes stands out."""
OTHERS = ("#a855f7", "#0891b2", "#dc2626", "#ca8a04")
"""Of topologies that the seed does not have, in turn."""

WIDTH, HEIGHT = 12.0, 3.5
"""Inches."""
GROUP = 0.84
"""Width of the bars of one shape, of the room that it has."""
SMALL, NORMAL = 7, 9
"""Points."""
ROOM = 1.3
"""Height of the axis, of the highest bar's: figures stand above the bars."""
DECADE = 10.0
LOG_RATIO = 20.0
"""Where the largest figure of a panel is more than this times its smallest, its axis is logarithmic."""


@dataclass(frozen=True)
class Panel:
    """One plot. values: by topology and shape, where there is one; shapes as they are to be written."""

    title: str
    shapes: Sequence[str]
    values: Mapping[tuple[str, str], Spread]


def check() -> None:
    """Raise HeteroError where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise HeteroError(
            f"the report needs matplotlib (the extra `picture` of sglang-hetero, which `make setup` installs): {error}"
        ) from error


def colours(topologies: Sequence[str]) -> dict[str, str]:
    others = [name for name in topologies if name not in COLOURS]
    return COLOURS | {name: OTHERS[number % len(OTHERS)] for number, name in enumerate(others)}


def figure_text(value: float) -> str:
    """Three digits that count, with no more zeros than these need."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def draw(panels: Sequence[Panel], topologies: Sequence[str], unit: str) -> bytes:
    """An SVG of panels side by side, each with its own axis: what is compared are the patterns, not the heights."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = colours(topologies)
    # The same figures give the same file.
    with rc_context({"svg.hashsalt": "matrix", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        for number, panel in enumerate(panels):
            _panel(figure.add_subplot(1, len(panels), number + 1), panel, topologies, found, unit)
        handles = [Patch(facecolor=found[name], label=name) for name in topologies]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=NORMAL, frameon=False)
        output = io.BytesIO()
        figure.savefig(output, format="svg", metadata={"Date": None})
    return output.getvalue()


def _panel(axes: Any, panel: Panel, topologies: Sequence[str], found: Mapping[str, str], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter

    width = GROUP / len(topologies)
    largest = [each.most for each in panel.values.values()]
    smallest = [each.least for each in panel.values.values()]
    logarithmic = bool(largest) and max(largest) > LOG_RATIO * min(smallest)
    for place, shape in enumerate(panel.shapes):
        for number, name in enumerate(topologies):
            value = panel.values.get((name, shape))
            if value is None:
                continue
            at = place + (number - (len(topologies) - 1) / 2) * width
            _bar(axes, at, width, value, found[name])
    axes.set_xticks(range(len(panel.shapes)), panel.shapes, fontsize=SMALL + 1, color=INK)
    axes.set_xlim(-0.5, max(len(panel.shapes), 1) - 0.5)
    if not largest:
        axes.text(0.5, 0.5, "no figures", transform=axes.transAxes, ha="center", color=PALE, fontsize=NORMAL)
    elif logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(min(smallest) / 2, max(largest) * DECADE**0.4)
    else:
        axes.set_ylim(0, max(largest) * ROOM)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_title(panel.title, loc="left", fontsize=NORMAL, color=INK)
    axes.set_ylabel(f"{unit}, logarithmic" if logarithmic else unit, fontsize=SMALL + 1, color=INK)
    axes.tick_params(axis="y", labelsize=SMALL, colors=INK)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bar(axes: Any, at: float, width: float, value: Spread, colour: str) -> None:
    axes.bar(at, value.median, width * 0.92, color=colour, linewidth=0)
    if value.rounds > 1:
        reach = [[value.median - value.least], [value.most - value.median]]
        axes.errorbar(at, value.median, yerr=reach, color=INK, linewidth=0.9, capsize=2, zorder=4)
    axes.annotate(
        figure_text(value.median),
        (at, value.most),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=90,
        fontsize=SMALL - 0.5,
        color=INK,
    )
