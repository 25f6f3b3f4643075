"""An assembler that a test can stop at a merge: the real one, with all that the worker gives it in one call."""

import threading
from contextlib import contextmanager

from sglang_hetero.layout import Item
from sglang_hetero.transfer.engine.loopback import GATE_SECONDS, Gate
from sglang_hetero.transfer.sources import SourceSet


class GatedAssembler:
    """Waits at the gate before, or behind, the first merge that has `least` pieces of pages, one the `nth` (from 0).

    Merges with fewer pieces wait until `collected` is set, so that a test can let others gather behind them.
    """

    def __init__(self, inner, gate: Gate, nth: int, before: bool, least: int) -> None:
        self._inner, self._gate, self._before, self._least = inner, gate, before, least
        self._left = nth
        self._stopped = False
        self.collected = threading.Event()
        self.pieces = 0
        """Of pages, in the merge that stops."""

    def merge_batch(self, arena, pieces) -> None:
        paged = sum(self._inner.item(piece.role, piece.layer) is Item.PAGE for piece in pieces)
        if not paged or self._stopped:  # linear state is merged by another thread
            self._inner.merge_batch(arena, pieces)
            return
        if paged < self._least:
            assert self.collected.wait(GATE_SECONDS), "no batch has gathered"
        self._stopped = stop = paged >= self._least and self._left < paged
        self._left -= paged
        if stop:
            self.pieces = paged
        if stop and self._before:
            self._gate.pass_through()
        self._inner.merge_batch(arena, pieces)
        if stop and not self._before:
            self._gate.pass_through()


@contextmanager
def gated_merge(known: SourceSet, nth: int = 0, before: bool = True, least: int = 1):
    """Merges of pages from these sources stop at the gate that is given. `known.assembler` is the gated one inside."""
    inner, gate = known.assembler, Gate()
    gated = known.assembler = GatedAssembler(inner, gate, nth, before, least)  # type: ignore[assignment]
    try:
        yield gate
    finally:
        gated.collected.set()  # type: ignore[attr-defined]
        gate.open()
        known.assembler = inner
