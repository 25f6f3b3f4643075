"""A request, a clock, and a log that catches crashes: parts of a world."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_hetero.transfer.reception import Progress
from tests.reshard_oracle.handover import Place


@dataclass
class Request:
    """One request. ends: pages there are after each chunk; the last two may be equal: an empty last chunk."""

    room: int
    tokens: int
    ends: tuple[int, ...]
    seed: int
    source: Place
    places: list[Place]
    sent: int = 0
    """Chunks that prefill's scheduler has handed over."""
    results: dict[str, Progress] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    bound_before: dict[str, int] = field(default_factory=dict)
    gate: Callable[[], bool] = lambda: True
    """`ready` of its chunks."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Crashes(logging.Handler):
    """Catches what a thread's last resort logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "turn failed" in record.getMessage():
            self.found.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")
