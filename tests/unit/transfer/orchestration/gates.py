"""An assembler that a test can stop in the middle of a merge."""

from contextlib import contextmanager

from sglang_hetero.layout import Item
from sglang_hetero.transfer.engine.loopback import Gate
from sglang_hetero.transfer.sources import SourceSet


class GatedAssembler:
    """Before the `nth` merge (from 0) it waits at the gate."""

    def __init__(self, inner, gate: Gate, nth: int = 0, before: bool = True) -> None:
        self._inner, self._gate, self._left, self._before = inner, gate, nth, before

    def merge_batch(self, arena, pieces) -> None:
        for piece in pieces:
            paged = self._inner.item(piece.role, piece.layer) is Item.PAGE
            stop = paged and self._left == 0
            self._left -= paged
            if stop and self._before:
                self._gate.pass_through()
            self._inner.merge_batch(arena, [piece])
            if stop and not self._before:
                self._gate.pass_through()


@contextmanager
def gated_merge(known: SourceSet, nth: int = 0, before: bool = True):
    """Merges of pages from these sources stop at the gate that is given."""
    inner, gate = known.assembler, Gate()
    known.assembler = GatedAssembler(inner, gate, nth, before)  # type: ignore[assignment]
    try:
        yield gate
    finally:
        gate.open()
        known.assembler = inner
