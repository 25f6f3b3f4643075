"""Where in a request's way a fault strikes: what holds the request there, and how that is seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.harness import On, Pair
from tests.harness.flow import Flow, Step
from tests.harness.processes import Condition, RankProcess
from tests.harness.sabotage import At, Do, Rule

MERGE_SECONDS = 1.5
"""So long a merge is held: SGLang's scheduler waits for it before it frees the pages of a request that has failed."""
EVERY = 1 << 16
"""A rule that meets all there are."""


class When(Enum):
    """The steps, in order; the value is how they are written."""

    BOOTSTRAP = "while bootstrapping"
    BOUND = "before the first chunk"
    PUSH = "mid-push"
    MERGE = "mid-merge"
    LAST = "after the last chunk, before FirstGeneration"
    FIRST = "after FirstGeneration"
    FINISH = "at Finish"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Who:
    """Ranks of a server. rank: of it, None for all."""

    on: On
    rank: int | None = None
    server: int = 0

    def of(self, pair: Pair) -> list[RankProcess]:
        """These processes."""
        group = (pair.prefills if self.on is On.PREFILL else pair.decodes)[self.server]
        return list(group.ranks) if self.rank is None else [group.ranks[self.rank]]


Placed = tuple[Who, Rule]
"""A rule, and the ranks where it holds."""


def holding(when: When, room: int, source: Who, target: Who) -> list[Placed]:
    """What keeps request `room` at this step. source, target: a prefill and a decode rank that it is held at."""
    everybody, first = Who(On.DECODE), Who(On.PREFILL, 0)
    held: dict[When, list[Placed]] = {
        When.BOOTSTRAP: [(everybody, Rule(At.POST, Do.HOLD, kind="Bind", room=room, count=EVERY))],
        When.BOUND: [],  # Handoff.paused_after
        When.PUSH: [(source, Rule(At.WRITE, Do.HOLD, room=room, skip=1))],
        When.MERGE: [(target, Rule(At.MERGE, Do.HOLD, room=room, seconds=MERGE_SECONDS))],
        When.LAST: [(first, Rule(At.CONTROL, Do.HOLD, room=room, count=EVERY))],
        When.FIRST: [
            (source, Rule(At.POST, Do.HOLD, kind="Ready", room=room, count=EVERY, total=True)),
            (first, Rule(At.CONTROL, Do.COUNT, room=room)),
        ],
        When.FINISH: [(everybody, Rule(At.POST, Do.HOLD, kind="Finish", room=room, count=EVERY))],
    }
    return held[when]


class Ambush:
    """Rules in the ranks of a pair."""

    def __init__(self, pair: Pair, placed: Sequence[Placed]) -> None:
        """Give them to their ranks; earlier ones of these ranks hold no more."""
        self._size = len(placed)
        self._ranks: list[tuple[RankProcess, list[int]]] = []
        for rank in pair.ranks:
            own = [index for index, (who, _) in enumerate(placed) if rank in who.of(pair)]
            if own:
                self._ranks.append((rank, own))
                rank.call("sabotage", [placed[index][1] for index in own])

    def met(self) -> list[int]:
        """How often each rule has met something, at ranks that answer."""
        found = [0] * self._size
        for rank, own in self._ranks:
            if rank.condition is Condition.RUNNING:
                for index, count in zip(own, rank.call("struck"), strict=True):
                    found[index] += count
        return found


def reached(when: When, room: int, ambush: Ambush) -> Callable[[Flow], bool]:
    """Whether request `room` is there. ambush: with the rules of `holding`, and no others."""

    def there(flow: Flow) -> bool:
        (journey,) = (each for each in flow.journeys if each.room == room)
        if when is When.BOUND:
            return journey.prefill is Step.CHUNKS and not journey.sent
        if when is When.FINISH and journey.decode is not Step.SUCCEEDED:
            return False
        if when in {When.LAST, When.FIRST} and journey.chunks:
            return False
        return all(ambush.met())

    return there
