"""A fault as data: what is done, to whom and when, and what must become of the request that it meets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from tests.harness import Handoff, On, Pair, Result
from tests.harness.flow import Strike

from .result import name
from .steps import Ambush, Placed
from .topologies import GRACE_SECONDS, STALL_SECONDS, Topology


class End(Enum):
    """What must become of the request on one side."""

    ARRIVES = auto()
    FAILS = auto()
    """With a reason that names the cause."""
    EITHER = auto()
    """It arrives with every byte right, or fails so."""
    DIES = auto()
    """The side is killed."""


Strikes = Callable[[Pair, int, Ambush], Sequence[Strike]]
"""Of a pair, the room of the request that is met, and the rules that are in place."""
PROMPT = Handoff(250, 4, seed=1)
"""The request that is met: four chunks that end anywhere, several windows of units."""
NEIGHBOUR = Handoff(129, 2, seed=2)
"""One of the same two servers, at the same time."""
STRANGER = Handoff(100, 2, seed=3, prefill=1, decode=1)
"""One of the other two servers."""


ABORTED = ("Aborted by AbortReq", "aborted between two chunks")
"""SGLang's own words on the side that is told, and the harness's in their place where SGLang has none."""


class Scene(Protocol):
    """What a script works with."""

    pair: Pair
    wrong: list[str]
    error: str
    seconds: float | None
    """As in FaultResult."""

    def hand_over(self, handoffs: Sequence[Handoff]) -> Result:
        """Hand requests over and compare every byte; a difference is noted as wrong."""


Script = Callable[[Scene], None]


def no_strikes(pair: Pair, room: int, ambush: Ambush) -> Sequence[Strike]:
    """The rules are the fault."""
    return ()


@dataclass(frozen=True)
class Case:
    """One fault at one topology. See FaultResult for the names that are the same there."""

    fault: str
    step: str
    topology: Topology
    expectation: str
    ends: dict[On, End]
    words: dict[On, tuple[str, ...]] = field(default_factory=dict)
    """Per side: what the reason must have, one of them at least."""
    rules: Callable[[int], Sequence[Placed]] = lambda room: ()
    """Of the room of the request that is met."""
    strikes: Strikes = no_strikes
    prelude: Callable[[Pair], None] | None = None
    """What is done to the pair before."""
    script: "Script | None" = None
    """What is done instead of handing one request over while rules and strikes hold."""
    prompt: Handoff = PROMPT
    others: tuple[Handoff, ...] = (NEIGHBOUR, STRANGER)
    """Requests that must arrive, whatever becomes of the one that is met."""
    within: float = STALL_SECONDS + GRACE_SECONDS
    """Seconds from the strike until the request must have ended on a side that is well."""
    restart: On | None = None
    """The first server of this side is started again afterwards."""
    restarted: On | None = None
    """The strikes have started the first server of this side again."""
    paused: On | None = None
    """This side, or a rank of it, is paused by the first strike and goes on with the last one."""
    quarantined: bool = False
    """Units stay apart until then, because a writer may still hit them."""
    meets: bool = True
    """Whether each rule must have met something, or else nothing has been tried."""

    @property
    def name(self) -> str:
        return name(self.fault, self.step, self.topology.name)
