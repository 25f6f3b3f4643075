"""What SGLang 0.5.23 itself gets wrong between sides of different TP size, as the harness sees it.

A row says which components arrive wrong. It is an expectation like any other: when the fault is gone the test that
reads the row fails, and the row has to be deleted.
"""

from dataclasses import dataclass

from sglang_hetero.layout.window import ConvLayout

from .oracle import Component


@dataclass(frozen=True)
class Fault:
    """One wrong handoff that upstream reports as a success."""

    components: frozenset[Component]
    """Components with wrong bytes; all others arrive exactly."""
    overruns: bool
    """Whether it also writes into slots of other requests."""


# `conv_slice_axis` stays 0 for a window-first slot (mem_cache/memory_pool.py:1071), so rows are taken for channels:
# the q/k/v split is skipped, and a writer's offset inside the slot is counted in windows.
_ROWS_TAKEN_FOR_CHANNELS = Fault(frozenset({Component.CONV}), overruns=True)

KNOWN_UPSTREAM_FAULTS: dict[tuple[ConvLayout, int, int], Fault] = {
    (ConvLayout.WINDOW_FIRST, 2, 1): _ROWS_TAKEN_FOR_CHANNELS,
    (ConvLayout.WINDOW_FIRST, 1, 2): _ROWS_TAKEN_FOR_CHANNELS,
    (ConvLayout.WINDOW_FIRST, 4, 2): _ROWS_TAKEN_FOR_CHANNELS,
}
"""By conv layout, prefill TP and decode TP."""
