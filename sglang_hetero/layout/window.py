"""The two orders in which a conv window lies in a slot, by name."""

from enum import Enum


class ConvLayout(Enum):
    """Order of the axes of one conv slot in memory, the outer one first."""

    CHANNELS_FIRST = "channels_first"
    """[channels, K-1], as on CUDA."""
    WINDOW_FIRST = "window_first"
    """[window, channels], as on an NPU; the window may have rows beside the live K-1."""
