"""The lifetime machines when messages vanish and processes die: through every interleaving of small transfers.

What is said again (`Repetition`) is an event that happens when nothing else can: clocks are slow. So a setup in which
only messages are lost has to end well in every run, and one in which processes die has to end. Whatever a dead process
had begun to write may still land until its session is closed.

Each rule that the code around the machines keeps to is broken once, and each setup finds the rules that it is for.
"""

from dataclasses import replace
from typing import Any

import pytest

from sglang_hetero.transfer.lifetime import Receiving, Sending
from tests.model_check.explore import explore
from tests.model_check.machines import Violation
from tests.model_check.setup import RIGHT, Budget, Setup

MOST_STATES = 200_000
ONE_SOURCE = ((0,),)
TWO_STAGES = ((0,), (1,))
PARTLY_SHARED = ((0,), (0, 1), (1,))

LOSS = Setup("a message is lost", repeats=True, chunks=(1, 1), eager=False, budget=Budget(losses=1))
LOSSES = [
    LOSS,
    replace(LOSS, name="two messages are lost", eager=True, budget=Budget(losses=2)),
    Setup(
        "lost, and pieces that not all share",
        repeats=True,
        chunks=(1, 2),
        window=2,
        batch=2,
        eager=False,
        sharers=PARTLY_SHARED,
        joined_totals=True,
        budget=Budget(losses=1),
    ),
    Setup("lost, with two destinations", repeats=True, destinations=2, joined_totals=True, budget=Budget(losses=1)),
    Setup("lost, with two requests", repeats=True, requests=2, joined_totals=True, budget=Budget(losses=1)),
    Setup(
        "lost, two stages and a read",
        repeats=True,
        stages=TWO_STAGES,
        chunks=(1,),
        joined_totals=True,
        pulls=True,
        budget=Budget(losses=1),
    ),
]
MORE_LOSSES = [
    replace(LOSSES[2], name="two lost, and pieces that not all share", budget=Budget(losses=2)),
    replace(LOSSES[3], name="two lost, with two destinations", budget=Budget(losses=2)),
]

ABORT = Setup(
    "lost, and an abort", repeats=True, chunks=(1, 1), joined_totals=True, budget=Budget(receiver_aborts=1, losses=1)
)
CRASH = Setup(
    "a source dies and comes again",
    repeats=True,
    requests=2,
    reborn=1,
    same_room=True,
    joined_totals=True,
    timeouts=True,
    budget=Budget(crashes=1),
)
DESTINATION = Setup(
    "a destination dies and comes again",
    repeats=True,
    requests=2,
    reborn=1,
    same_room=True,
    joined_totals=True,
    timeouts=True,
    budget=Budget(destination_crashes=1),
)
SMALL_CRASH = replace(
    CRASH,
    name="a source dies, an abort, one lost",
    stages=ONE_SOURCE,
    budget=Budget(crashes=1, receiver_aborts=1, losses=1),
)
SUCCESSOR = replace(
    CRASH, name="what is for a source's successor", stages=ONE_SOURCE, timeouts=False, successors_succeed=True
)
ENDS = [
    ABORT,
    replace(
        ABORT,
        name="lost, aborts by both sides, a failed write",
        timeouts=True,
        budget=Budget(receiver_aborts=1, source_aborts=1, write_failures=1, losses=1),
    ),
    replace(
        ABORT,
        name="lost, and a write in doubt",
        timeouts=True,
        budget=Budget(receiver_aborts=1, write_failures=1, in_doubt=True, losses=1),
    ),
    replace(ABORT, name="said again too early", budget=Budget(receiver_aborts=1, early_repetitions=2)),
    replace(ABORT, name="lost, a source dies", timeouts=True, budget=Budget(crashes=1, losses=1)),
    CRASH,
    SMALL_CRASH,
    SUCCESSOR,
    DESTINATION,
    replace(
        DESTINATION,
        name="a destination dies, an abort, one lost",
        stages=ONE_SOURCE,
        budget=Budget(destination_crashes=1, receiver_aborts=1, losses=1),
    ),
    replace(
        DESTINATION,
        name="both sides die and come again",
        stages=ONE_SOURCE,
        budget=Budget(destination_crashes=1, crashes=1),
    ),
]
MORE_ENDS = [
    replace(SUCCESSOR, name="what is for one of two sources' successor", stages=CRASH.stages),
    replace(
        DESTINATION, name="a destination dies, and an abort", budget=Budget(destination_crashes=1, receiver_aborts=1)
    ),
    replace(CRASH, name="a source dies, and one lost", budget=Budget(crashes=1, losses=1)),
    Setup(
        "the room again, lost and aborted",
        repeats=True,
        requests=2,
        same_room=True,
        joined_totals=True,
        timeouts=True,
        budget=Budget(losses=1, receiver_aborts=1),
    ),
    Setup(
        "two stages, a read, lost and aborted",
        repeats=True,
        stages=TWO_STAGES,
        chunks=(2,),
        window=2,
        joined_totals=True,
        pulls=True,
        budget=Budget(losses=1, receiver_aborts=1),
    ),
]


def of(setup: Setup) -> str:
    return setup.name


def explored(setup: Setup) -> tuple[int, int]:
    report = explore(setup, MOST_STATES)
    print(f"{setup.name}: {report}")
    return report.finals, report.succeeded


def with_larger(setups: list[Setup], larger: list[Setup]) -> list[Any]:
    """What is always explored, and what takes long."""
    return [*setups, *(pytest.param(setup, marks=pytest.mark.full) for setup in larger)]


@pytest.mark.parametrize("setup", with_larger(LOSSES, MORE_LOSSES), ids=of)
def test_whatever_is_lost_it_ends_well(setup: Setup) -> None:
    finals, succeeded = explored(setup)
    assert finals == succeeded > 0


@pytest.mark.parametrize("setup", with_larger(ENDS, MORE_ENDS), ids=of)
def test_whoever_dies_it_ends(setup: Setup) -> None:
    finals, succeeded = explored(setup)
    assert finals > succeeded > 0


# What would be without it.


def test_without_repetition_and_timeouts_a_lost_message_locks_a_request_up() -> None:
    with pytest.raises(Violation, match="no way out"):
        explore(replace(LOSS, repeats=False), MOST_STATES)


def test_timeouts_alone_do_not_bring_units_home() -> None:
    """A lost Abort or Drained: the request has failed, and its units wait for ever."""
    with pytest.raises(Violation, match="no way out"):
        explore(replace(ABORT, repeats=False, timeouts=True), MOST_STATES)


def without(rule: str, setup: Setup) -> Setup:
    return replace(setup, rules=replace(setup.rules, **{rule: False}))


RULES = [
    ("gone_when_closed", CRASH, "come home while source|units that it does not hold"),
    ("epochs_never_again", replace(DESTINATION, stages=ONE_SOURCE), "source 0 wrote"),
    ("binds_name_the_process", SMALL_CRASH, "units that it does not hold|come home while source"),
    ("aborts_name_the_process", SUCCESSOR, "request 1 is failed at destination 0, and nothing happened to it"),
    (
        "drained_by_the_process",
        # A successor that keeps to the rule before says nothing that could be taken so: this is the second lock.
        replace(
            SMALL_CRASH,
            budget=Budget(crashes=1, receiver_aborts=1),
            rules=replace(RIGHT, aborts_name_the_process=False),
        ),
        "come home while source",
    ),
    ("aborts_repeated", ABORT, "no way out"),
    ("announcements_repeated", LOSS, "no way out"),
    ("first_repeated", LOSS, "no way out"),
    ("ends_remembered", LOSS, "no way out"),
    ("repetition_may_fail", replace(ABORT, budget=Budget(early_repetitions=1)), "come home while source|does not hold"),
]


def test_every_rule_is_broken_once() -> None:
    assert [rule for rule, _, _ in RULES] == list(vars(RIGHT))


@pytest.mark.parametrize(("rule", "setup", "message"), RULES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_rule_is_found(rule: str, setup: Setup, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(without(rule, setup), MOST_STATES)


class AnnouncesWhatIsBeingWritten(Sending):
    @property
    def announced(self) -> range:
        return range(self.acknowledged, self.taken)


class AnnouncesOnlyWhatFollows(Sending):
    @property
    def announced(self) -> range:
        return range(self.acknowledged + 1, max(self.acknowledged + 1, super().announced.stop))


class ForgetsWhatIsMerged(Receiving[Any]):
    """A piece that is announced again is merged again, from a unit that may hold another one by then."""

    def merged(self, stage: int, seq: int) -> tuple[Any, ...]:
        actions = super().merged(stage, seq)
        if self._progress and self._progress[stage].acked > seq:
            del self._progress[stage].arrivals[seq]
        return actions

    def ready(self, source: int, seq: int, piece: Any, sharers: frozenset[int]) -> tuple[Any, ...]:
        stage = self._stage_of[source]
        if not self._ended and seq < self._progress[stage].acked:
            self._merging.add((stage, seq))
            return super().ready(source, self._progress[stage].acked, piece, sharers)
        return super().ready(source, seq, piece, sharers)


class CountsRepetitions(Receiving[Any]):
    """Two announcements are enough, whoever they are of."""

    def ready(self, source: int, seq: int, piece: Any, sharers: frozenset[int]) -> tuple[Any, ...]:
        arrival = None if self._ended else self._progress[self._stage_of[source]].arrivals.get(seq)
        if arrival is not None and source in arrival.sources:
            return super().ready(next(iter(sharers - {source})), seq, piece, sharers)
        return super().ready(source, seq, piece, sharers)


class ForgetsTheReasonOfTheRoom(Receiving[Any]):
    """After the end nobody is waited for any more."""

    @property
    def may_write(self) -> frozenset[int]:
        return frozenset() if self._ended else super().may_write


EARLY = replace(ABORT, name="early", budget=Budget(early_repetitions=1))
MACHINES = [
    ({"make_sending": AnnouncesWhatIsBeingWritten}, EARLY, "source . wrote"),
    ({"make_sending": AnnouncesOnlyWhatFollows}, LOSS, "no way out|announces"),
    ({"make_receiving": ForgetsWhatIsMerged}, EARLY, "wrote|merge|outside"),
    ({"make_receiving": CountsRepetitions}, EARLY, "source . wrote"),
    ({"make_receiving": ForgetsTheReasonOfTheRoom}, ABORT, "come home while source|does not hold"),
]


@pytest.mark.parametrize(
    ("wrong", "setup", "message"), MACHINES, ids=[next(iter(wrong.values())).__name__ for wrong, _, _ in MACHINES]
)
def test_a_wrong_machine_is_found(wrong: dict[str, Any], setup: Setup, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(replace(setup, **wrong), MOST_STATES)


def test_the_right_machines_pass_where_repetitions_come_early() -> None:
    assert explore(EARLY, MOST_STATES).succeeded
