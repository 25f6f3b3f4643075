"""What is explored: how many of everything, which faults may happen, and the classes to drive."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sglang_hetero.transfer.lifetime import Epochs, Receiving, Sending, Stage

ROOMS_KEPT = 8


@dataclass(frozen=True)
class Budget:
    """How many times each fault may happen in one run."""

    receiver_aborts: int = 0
    source_aborts: int = 0
    write_failures: int = 0
    in_doubt: bool = False
    """Whether bytes of a failed write may still arrive, until the session is closed."""
    duplicates: int = 0
    crashes: int = 0
    """Of source processes."""
    destination_crashes: int = 0
    losses: int = 0
    """Messages that vanish."""
    early_repetitions: int = 0
    """A side says something again although what it waits for is under way."""
    contradictions: int = 0
    """A source announces another piece by a number than the one that it wrote."""


@dataclass(frozen=True)
class Rules:
    """What the code around the machines keeps to. Each is True; a test makes one False to see that it is needed."""

    gone_when_closed: bool = True
    """A source counts as gone when its session is closed, not when its process has ended."""
    epochs_never_again: bool = True
    """A destination that is started again counts epochs from a number that no former process used."""
    binds_name_the_process: bool = True
    """A Bind for a former process is not taken by its successor."""
    aborts_name_the_process: bool = True
    """An Abort for a former process ends nothing at its successor, where the room may be another request's."""
    drained_by_the_process: bool = True
    """What a successor says is not taken for what the former process says."""
    aborts_repeated: bool = True
    announcements_repeated: bool = True
    first_repeated: bool = True
    ends_remembered: bool = True
    """A destination answers a source that still sends a request that has ended there."""
    repetition_may_fail: bool = True
    """A source that cannot be told again need not have missed the first time: it has not drained by that."""


RIGHT = Rules()


@dataclass(frozen=True)
class Setup:
    """Requests x sources x destinations, and the bounds of the exploration."""

    name: str
    stages: tuple[tuple[int, ...], ...] = ((0, 1),)
    """Source numbers of each stage."""
    destinations: int = 1
    requests: int = 1
    orders: tuple[tuple[int, ...], ...] = ()
    """Per destination the order in which requests ask for units; empty: ascending everywhere."""
    same_room: bool = False
    """The requests use one room, one after the other: request number = epoch."""
    reborn: int = 0
    """So many requests, the last ones, are for the processes that take the place of those that crashed."""
    successors_succeed: bool = False
    """Whether those have to end well: the crash is all that happens, and it is over when they begin."""
    windows: int = 1
    """How many requests' units a destination's arena has."""
    window: int = 1
    batch: int = 1
    """Pieces that a source writes at a time at most."""
    chunks: tuple[int, ...] = (1,)
    """Pieces per stage of each of prefill's chunks."""
    sharers: tuple[tuple[int, ...], ...] = ()
    """Per piece the sources that have a share, by their place in the stage; empty: all have one of each."""
    eager: bool = True
    """Prefill runs at once when all destinations are bound; otherwise whenever."""
    joined_totals: bool = False
    """The total and FirstGeneration come with the last announcement; otherwise by themselves, in any order."""
    ack_overtakes_bind: bool = False
    """Whether an Ack may reach a source before the Bind and is lost; then a room may be stuck."""
    aborts_reach_requests: bool = True
    """Whether an Abort before its Bind ends the request at the source; it may not be there yet."""
    merges_take_time: bool = True
    """Otherwise a merge ends as it begins; makes room for more of everything else."""
    pulls: bool = False
    repeats: bool = False
    """Whether what may have been lost is said again when nothing else happens."""
    timeouts: bool = False
    """Whether both sides give up a request when nothing else happens. Otherwise only because of a fault."""
    rules: Rules = RIGHT
    budget: Budget = field(default_factory=Budget)
    make_sending: Callable[[int], Any] = Sending
    make_receiving: Callable[[tuple[Stage, ...], bool], Any] = Receiving
    make_epochs: Callable[[int], Any] = Epochs

    @cached_property
    def sources(self) -> int:
        return sum(len(stage) for stage in self.stages)

    @cached_property
    def pieces(self) -> int:
        """Of each stage."""
        return sum(self.chunks)

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Stage by source number."""
        return {source: index for index, stage in enumerate(self.stages) for source in stage}

    @cached_property
    def sharing(self) -> dict[tuple[int, int], frozenset[int]]:
        """By stage and seq: numbers of the sources that have a share of the piece."""
        return {
            (index, seq): frozenset(stage if not self.sharers else (stage[place] for place in self.sharers[seq]))
            for index, stage in enumerate(self.stages)
            for seq in range(self.pieces)
        }

    def is_reborn(self, request: int) -> bool:
        """Whether a request is for the processes that take the place of those that crashed."""
        return request >= self.requests - self.reborn

    def identity(self, request: int) -> tuple[int, int]:
        """Room and epoch of a request."""
        first_again = self.requests - self.reborn if self.is_reborn(request) else 0
        epoch = request if self.rules.epochs_never_again else request - first_again
        return (0, epoch) if self.same_room else (request, 0)

    def order(self, destination: int) -> tuple[int, ...]:
        return self.orders[destination] if self.orders else tuple(range(self.requests))
