"""The lifetime machines through every interleaving of small transfers.

The full product of 2 sources, 2 destinations, 2 requests and all faults has too many states. Each setup below is
explored completely: two requests, and two destinations, each with aborts by either side; pieces that not all share with
an abort; repeated messages with one request and with a room's second use; a source's death with two requests. Two
destinations together with repeated messages or a second use are only walked through by chance. Bounds are part of the
setups: at most 3 pieces per stage, 2 units and 4 faults of a run. Messages between any two ranks arrive in any order
and as late as can be, but for an Ack, which follows its Bind. What gets lost is in test_lifetime_lossy.py.
"""

from dataclasses import replace

import pytest

from tests.model_check.explore import explore, walk
from tests.model_check.machines import Violation
from tests.model_check.setup import Budget, Setup

MOST_STATES = 300_000
MOST_STEPS = 5_000
WALKS = 40

TWO_STAGES = ((0,), (1,))
ONE_SOURCE = ((0,),)
PARTLY_SHARED = ((0,), (0, 1), (1,))
"""The first piece comes from source 0 alone, the last one from source 1 alone."""

CALM = [
    Setup("two requests at a time, bound in different orders", requests=2, windows=2, joined_totals=True),
    Setup("two destinations", destinations=2, joined_totals=True),
    Setup("pieces that not all share", chunks=(1, 2), window=2, batch=2, eager=False, sharers=PARTLY_SHARED),
]

FAULTY = [
    Setup("one request", chunks=(1, 1), budget=Budget(receiver_aborts=1, source_aborts=1, write_failures=1)),
    replace(CALM[0], name="two requests at a time, a write fails", budget=Budget(write_failures=1)),
    Setup(
        "chunks, batches and pieces that not all share",
        chunks=(1, 2),
        window=2,
        batch=2,
        eager=False,
        sharers=PARTLY_SHARED,
        joined_totals=True,
        budget=Budget(receiver_aborts=1, write_failures=1),
    ),
    Setup(
        "repeated messages",
        chunks=(1, 1),
        eager=False,
        sharers=((0,), (0, 1)),
        budget=Budget(receiver_aborts=1, duplicates=1),
    ),
    Setup(
        "same room again",
        requests=2,
        same_room=True,
        joined_totals=True,
        budget=Budget(receiver_aborts=1, duplicates=1),
    ),
    Setup(
        "both destinations of one source abort, and more",
        stages=ONE_SOURCE,
        destinations=2,
        joined_totals=True,
        budget=Budget(receiver_aborts=2, source_aborts=1, write_failures=1),
    ),
    Setup(
        "two destinations, two requests, units for one",
        stages=ONE_SOURCE,
        destinations=2,
        requests=2,
        joined_totals=True,
        merges_take_time=False,
        budget=Budget(receiver_aborts=1),
    ),
    Setup(
        "two stages, and a read at the end",
        stages=TWO_STAGES,
        chunks=(2,),
        window=2,
        joined_totals=True,
        pulls=True,
        budget=Budget(receiver_aborts=1, write_failures=1),
    ),
    Setup(
        "writes in doubt",
        chunks=(1, 1),
        budget=Budget(receiver_aborts=1, source_aborts=1, write_failures=1, in_doubt=True),
    ),
    Setup("a source contradicts another", chunks=(1, 1), budget=Budget(duplicates=1, contradictions=1)),
]

LARGE = [
    replace(CALM[0], name="two requests at a time, an abort", budget=Budget(receiver_aborts=1)),
    Setup(
        "a source dies",
        requests=2,
        joined_totals=True,
        budget=Budget(receiver_aborts=1, crashes=1),
    ),
    replace(CALM[1], name="one of two destinations aborts", budget=Budget(receiver_aborts=1)),
    Setup(
        "same room again, with other units",
        requests=2,
        same_room=True,
        windows=2,
        joined_totals=True,
        budget=Budget(receiver_aborts=1),
    ),
    Setup(
        "two requests, units for one",
        requests=2,
        joined_totals=True,
        aborts_reach_requests=False,
        budget=Budget(receiver_aborts=1, source_aborts=1, write_failures=1),
    ),
    replace(CALM[1], name="two destinations, a source aborts", budget=Budget(source_aborts=1)),
    replace(CALM[1], name="both destinations abort", merges_take_time=False, budget=Budget(receiver_aborts=2)),
]
"""In `make test-full` only."""

FULL = Setup(
    "everything",
    destinations=2,
    requests=2,
    window=2,
    batch=2,
    chunks=(1, 2),
    sharers=PARTLY_SHARED,
    eager=False,
    budget=Budget(receiver_aborts=2, source_aborts=1, write_failures=1, duplicates=3),
)


@pytest.mark.parametrize("setup", CALM, ids=lambda setup: setup.name)
def test_without_a_fault_everything_is_handed_over(setup: Setup) -> None:
    report = explore(setup, MOST_STATES)
    assert report.finals == report.succeeded > 0


@pytest.mark.parametrize("setup", FAULTY, ids=lambda setup: setup.name)
def test_whatever_happens_it_ends_well_or_with_a_failure(setup: Setup) -> None:
    report = explore(setup, MOST_STATES)
    print(f"{setup.name}: {report}")
    assert report.finals > report.succeeded > 0


@pytest.mark.full
@pytest.mark.parametrize("setup", LARGE, ids=lambda setup: setup.name)
def test_whatever_happens_in_larger_worlds(setup: Setup) -> None:
    test_whatever_happens_it_ends_well_or_with_a_failure(setup)


def test_walks_through_everything_at_once() -> None:
    succeeded = sum(walk(FULL, seed, MOST_STEPS) for seed in range(WALKS))
    same_room = replace(FULL, same_room=True)
    succeeded_again = sum(walk(same_room, seed, MOST_STEPS) for seed in range(WALKS))
    assert 0 < succeeded < WALKS
    assert 0 < succeeded_again < WALKS


def test_walks_with_losses_and_restarts() -> None:
    budget = Budget(duplicates=1, losses=2, early_repetitions=1, crashes=1, destination_crashes=1)
    setup = replace(FULL, requests=3, reborn=1, repeats=True, timeouts=True, budget=budget)
    succeeded = [
        walk(replace(setup, same_room=same), seed, MOST_STEPS) for seed in range(WALKS // 2) for same in (False, True)
    ]
    assert any(succeeded)
    assert not all(succeeded)


# What the callers owe the machines: the explorer finds the way to the lock-up when they do not keep to it.


def test_destinations_must_ask_for_units_in_the_same_order() -> None:
    """Prefill runs a request when all destinations have bound it, so units are held while others are awaited."""
    setup = Setup(
        "opposite orders", stages=ONE_SOURCE, destinations=2, requests=2, orders=((0, 1), (1, 0)), joined_totals=True
    )
    with pytest.raises(Violation, match="no way out"):
        explore(setup, MOST_STATES)


def test_an_ack_must_not_be_lost_because_its_bind_is_still_under_way() -> None:
    """A piece is merged and acknowledged without a source that has no share of it, perhaps before that is bound."""
    setup = Setup("early Ack", chunks=(1, 1), sharers=((0,), (0, 1)), eager=False, ack_overtakes_bind=True)
    with pytest.raises(Violation, match="deliver ack 0 1 0 1"):
        explore(setup, MOST_STATES)
