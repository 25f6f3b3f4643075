"""A moment of everything, as a value that can be compared and hashed."""

from typing import Any, NamedTuple

(
    RECEIVER_ABORT,
    SOURCE_ABORT,
    WRITE_FAILURE,
    DUPLICATE,
    CRASH,
    CONTRADICTION,
    DESTINATION_CRASH,
    LOSS,
    EARLY_REPETITION,
) = range(9)
"""Kinds of faults, by their place in State.faults."""
NOBODY = -1
INCARNATION = "destination {}, life {}"
PULL: tuple[int, int] = (-1, -1)
"""Among the running merges of a room: its read, which uses all units."""

Message = tuple[Any, ...]
"""Kind, request, source, destination, and what the kind needs."""


class Room(NamedTuple):
    """A request at a destination."""

    machine: int
    """NOBODY once the process that had it is dead."""
    window: int = NOBODY
    """Which of the arena's windows it holds."""
    running: frozenset[tuple[int, int]] = frozenset()
    merged: frozenset[tuple[int, int]] = frozenset()
    ends: frozenset[str] = frozenset()
    """Actions of which there may only be one."""
    known: frozenset[Any] = frozenset()
    """"first" once FirstGeneration has come, and (stage, seq) of pieces about which a source did not tell the truth."""


class Link(NamedTuple):
    """A request on its way from a source to a destination."""

    machine: int = NOBODY
    window: int = NOBODY
    """Which of the arena's windows the Bind named."""
    batch: range | None = None
    """What the engine is writing."""
    wrote: int = 0
    asked: bool = False
    """An Abort waits for its answer."""
    doubt: bool = False
    """Bytes of a failed write may still arrive."""


class Prefill(NamedTuple):
    """A request at a source."""

    chunks: int = 0
    failed: bool = False


class Arena(NamedTuple):
    """Units of a destination, as windows; the requests wait in order."""

    owners: tuple[int, ...]
    waiting: tuple[int, ...]


class State(NamedTuple):
    """Everything, as a value. Indices: see `World`."""

    rooms: tuple[Room, ...]
    links: tuple[Link, ...]
    prefills: tuple[Prefill, ...]
    epochs: tuple[int, ...]
    """Per source its machine; NOBODY while its process is dead."""
    arenas: tuple[Arena, ...]
    lives: tuple[int, ...]
    """Per source, then per destination, how often it was started again."""
    landing: frozenset[int]
    """Sources whose process is dead and whose session is not closed: what it had begun may still arrive."""
    net: frozenset[Message]
    faults: tuple[int, ...]
    """How many of each kind may still happen."""
