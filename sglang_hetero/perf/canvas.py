"""An empty picture: the one place that asks for matplotlib (extra `picture`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hetero.errors import TraceError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def empty(width: float, height: float, dpi: int) -> Figure:
    """A figure of width x height inches at `dpi` dots per inch, to be filled and saved as PNG; no window is opened.

    Raises TraceError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TraceError(f"a picture needs matplotlib (the extra `picture` of sglang-hetero): {error}") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
