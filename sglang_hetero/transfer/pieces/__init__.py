"""What is sent at a time, in which order, to where in a unit of staging; and what of a request has arrived.

Both sides build the same sequence from the same plan, so that messages only number it. No torch, no SGLang, no I/O.
"""

from .arrival import DestinationSide
from .coverage import Coverage
from .piece import ALIGN, Part, Piece, SourceSide, pages_of
from .program import StageProgram, StateMode, pulled
from .progress import COMPLETE, NOTHING, Mark, layer_done
from .window import LARGEST_PREFILL_TP, UNIT_OPTION, UNIT_TARGET, Window, unit_bytes_for, window_for

__all__ = [
    "ALIGN",
    "COMPLETE",
    "LARGEST_PREFILL_TP",
    "NOTHING",
    "UNIT_OPTION",
    "UNIT_TARGET",
    "Coverage",
    "DestinationSide",
    "Mark",
    "Part",
    "Piece",
    "SourceSide",
    "StageProgram",
    "StateMode",
    "Window",
    "layer_done",
    "pages_of",
    "pulled",
    "unit_bytes_for",
    "window_for",
]
