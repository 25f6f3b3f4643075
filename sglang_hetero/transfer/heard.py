"""When processes last said anything."""

from __future__ import annotations

from collections import OrderedDict

MAX_HEARD = 1 << 12
"""Processes that are remembered, those heard last."""


class Heard:
    """By incarnation. Not thread-safe; whoever has one guards it."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, float] = OrderedDict()

    def note(self, incarnation: str, now: float) -> None:
        """It has said something, whatever it is: it lives."""
        self._last[incarnation] = now
        self._last.move_to_end(incarnation)
        while len(self._last) > MAX_HEARD:
            self._last.popitem(last=False)

    def last(self, incarnation: str) -> float:
        """When it said something, -inf if that is not known."""
        return self._last.get(incarnation, float("-inf"))
