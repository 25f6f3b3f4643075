"""The table as a picture: score by depth, and accept length of each row. Needs matplotlib (extra `picture`)."""

from pathlib import Path
from typing import Any

from sglang_hetero.errors import TraceError
from sglang_hetero.perf import canvas

from .summary import Summary
from .verdict import Figures

WIDTH, ROW_HEIGHT, LEAST_HEIGHT, DPI = 12.0, 0.27, 4.0, 120
INK, GRID, WHOLE, BROKEN = "#1f2937", "#e5e7eb", "#2563eb", "#dc2626"
TEXT = 8
LOW, MIDDLE, HIGH = "#b91c1c", "#fde68a", "#15803d"


def draw(summary: Summary, path: Path) -> None:
    """Write a PNG. Raises TraceError without rows or matplotlib."""
    rows = summary.figures
    if not rows:
        raise TraceError("there are no rows to draw")
    height = max(LEAST_HEIGHT, ROW_HEIGHT * len(rows) + 1.5)
    figure = canvas.empty(WIDTH, height, DPI)
    from matplotlib.colors import LinearSegmentedColormap

    depths, score, accept = figure.subplots(1, 3, sharey=True, width_ratios=(1.1, 1, 1))
    shades = LinearSegmentedColormap.from_list("score", [LOW, MIDDLE, HIGH])
    _by_depth(depths, rows, shades)
    _dots(score, [(each.rate, each.score.low, each.score.high) for each in rows], rows)
    score.set_xlim(-0.03, 1.03)
    _title(score, "score, and its 95 % interval")
    _dots(accept, [_accept(each) for each in rows], rows)
    _title(accept, "accept length (tokens per round), 95 %")
    depths.set_yticks(range(len(rows)), [f"{each.row.name}  {_short(each)}" for each in rows], fontsize=TEXT)
    depths.set_ylim(len(rows) - 0.5, -0.5)
    figure.savefig(path, format="png")


def _short(each: Figures) -> str:
    return "" if not each.row.fault else f"[{each.verdict.value}]"


def _accept(each: Figures) -> tuple[float, float, float] | None:
    if each.accept is None:
        return None
    between = each.accept_interval
    return each.accept, between.low if between else each.accept, between.high if between else each.accept


def _by_depth(axes: Any, rows: tuple[Figures, ...], shades: Any) -> None:
    depths = [depth for depth, _, _ in rows[0].right]
    axes.imshow(
        [[right / asked for _, right, asked in each.right] for each in rows],
        aspect="auto",
        vmin=0.0,
        vmax=1.0,
        cmap=shades,
        interpolation="nearest",
    )
    for line, each in enumerate(rows):
        for column, (_, right, asked) in enumerate(each.right):
            dark = not 0.25 < right / asked < 0.75
            axes.text(
                column,
                line,
                f"{right / asked:.2f}",
                ha="center",
                va="center",
                fontsize=TEXT - 1,
                color="white" if dark else INK,
            )
    axes.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    _title(axes, f"score by depth of the pair, {rows[0].right[0][2]} questions each")
    axes.grid(visible=False)


def _dots(axes: Any, points: list[tuple[float, float, float] | None], rows: tuple[Figures, ...]) -> None:
    for line, (point, each) in enumerate(zip(points, rows, strict=True)):
        if point is None:
            continue
        middle, low, high = point
        colour = BROKEN if each.row.fault and each.row.fault != "control" else WHOLE
        axes.plot([low, high], [line, line], color=colour, linewidth=1.6)
        axes.plot([middle], [line], "o", color=colour, markersize=4)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.7)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=TEXT + 1, color=INK)
    axes.tick_params(labelsize=TEXT, colors=INK)
