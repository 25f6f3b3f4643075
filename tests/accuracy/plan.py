"""The rows of the recall table, and which of them share a fleet. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

UNDIVIDED = "mixed_tp1"
CHANNELS_FIRST, WINDOW_FIRST = "channels_first", "window_first"
TOPOLOGIES = (
    (UNDIVIDED, CHANNELS_FIRST),
    ("mixed_tp2", CHANNELS_FIRST),
    ("mixed_tp4", CHANNELS_FIRST),
    ("p2_d1", CHANNELS_FIRST),
    ("p2_d1", WINDOW_FIRST),
    ("p2_d2", CHANNELS_FIRST),
    ("p1_d2", CHANNELS_FIRST),
    ("p4_d1", CHANNELS_FIRST),
    ("p2x2_d2", CHANNELS_FIRST),
)
"""Whole ones; the first is what the others are compared with."""
BROKEN = (
    ("p2_d1", ("control", "conv-kv", "conv-kv-one", "conv-sources", "ssm-head", "ssm-head-one", "draft", "kv")),
    ("p1_d2", ("control", "conv-kv", "ssm-head", "draft")),
    ("p4_d1", ("control", "conv-sources")),
)
"""Per topology the faults, of tests/accuracy/faults.py. The one that does nothing is first."""


@dataclass(frozen=True)
class Row:
    """One row: a topology, and what is done to its merge; empty for nothing, without the hook."""

    topology: str
    conv_layout: str = CHANNELS_FIRST
    fault: str = ""

    @property
    def name(self) -> str:
        parts = [self.topology]
        parts += ["window-first"] if self.conv_layout == WINDOW_FIRST else []
        parts += [self.fault] if self.fault else []
        return ":".join(parts)

    @property
    def whole(self) -> "Row":
        """The row of the same topology with nothing in its way."""
        return Row(self.topology, self.conv_layout)

    @property
    def fleet(self) -> tuple[str, str, bool]:
        """Rows of one fleet are asked of the same servers, one after the other."""
        return self.topology, self.conv_layout, bool(self.fault)


BLIND_SPOTS = frozenset({Row("p2_d1", fault="conv-sources")})
"""Broken rows that model `recall` does not show: transformers, its window changed in that way, gives the same answers.
With four sources it does not."""


def rows() -> list[Row]:
    """All, in order; the undivided server is the first."""
    found = [Row(*each) for each in TOPOLOGIES]
    return found + [Row(topology, fault=fault) for topology, faults in BROKEN for fault in faults]


def only(every: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Those whose names, or beginnings of names up to a colon, fit one of the patterns; all without patterns."""

    def fits(row: Row) -> bool:
        parts = row.name.split(":")
        names = [":".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    return [row for row in every if fits(row)] if patterns else list(every)


def fleets(every: Iterable[Row]) -> list[list[Row]]:
    """The rows of each fleet, in the order of the first of them."""
    found: dict[tuple[str, str, bool], list[Row]] = {}
    for row in every:
        found.setdefault(row.fleet, []).append(row)
    return list(found.values())
