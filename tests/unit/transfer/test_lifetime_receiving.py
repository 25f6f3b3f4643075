"""Receiving: each event in each state."""

from collections.abc import Callable
from typing import Any

import pytest

from sglang_hetero.errors import ProtocolError
from sglang_hetero.transfer.lifetime import (
    Ack,
    Merge,
    Pull,
    Receiving,
    ReceivingStatus,
    ReturnUnits,
    Settle,
    Stage,
)

STAGE = Stage((0, 1), 2)
BOTH = frozenset({0, 1})
QUEUED, OPEN, COMPLETE, FAILED = ReceivingStatus
Machine = Receiving[str]


def queued() -> Machine:
    return Receiving((STAGE,))


def opened() -> Machine:
    receiving = queued()
    assert receiving.bound() == ()
    return receiving


def merging() -> Machine:
    """Piece 0 is being merged, and nothing else is missing."""
    receiving = opened()
    assert receiving.total(0, 1) == receiving.total(1, 1) == receiving.first_generation({0: 1}) == ()
    assert receiving.ready(0, 0, "K", BOTH) == ()
    assert receiving.ready(1, 0, "K", BOTH) == (Merge(0, 0, "K"),)
    return receiving


def complete() -> Machine:
    receiving = merging()
    assert receiving.merged(0, 0) == (Ack(0, 1), Settle(None), ReturnUnits())
    return receiving


def failed_unbound() -> Machine:
    receiving = queued()
    assert receiving.fail("first") == (Settle("first"), ReturnUnits())
    return receiving


def failed() -> Machine:
    receiving = opened()
    assert receiving.fail("first") == (Settle("first"),)
    return receiving


def failed_merging() -> Machine:
    """Source 1 has drained; source 0 has not, and a merge is running."""
    receiving = merging()
    assert receiving.fail("first") == (Settle("first"),)
    assert receiving.drained(1) == ()
    return receiving


STATES = (queued, opened, merging, complete, failed_unbound, failed, failed_merging)
EVENTS: dict[str, Callable[[Machine], tuple[Any, ...]]] = {
    "bound": lambda receiving: receiving.bound(),
    "ready": lambda receiving: receiving.ready(0, 0, "K", BOTH),
    "total": lambda receiving: receiving.total(0, 1),
    "merged": lambda receiving: receiving.merged(0, 0),
    "first_generation": lambda receiving: receiving.first_generation({0: 1}),
    "pulled": lambda receiving: receiving.pulled(),
    "fail": lambda receiving: receiving.fail("second"),
    "peer_failed": lambda receiving: receiving.peer_failed(0, "second"),
    "drained 0": lambda receiving: receiving.drained(0),
    "gone 0": lambda receiving: receiving.gone(0),
}
NO = "ProtocolError"


def failing(reason: str, *more: Any) -> tuple[Any, ...]:
    return (Settle(reason), *more)


STOPPED, GONE = "source 0 has stopped", "source 0 is gone"
END = (Ack(0, 1), Settle(None), ReturnUnits())
HOME = ReturnUnits()
# The actions, in the order of STATES.
TABLE: dict[str, tuple[Any, ...]] = {
    "bound": ((), (), (), NO, NO, NO, NO),
    "ready": (NO, (), (), (), (), (), ()),
    "total": (NO, (), (), (), (), (), ()),
    "merged": (NO, NO, END, NO, NO, NO, ()),
    "first_generation": (NO, (), (), (), (), (), ()),
    "pulled": (NO, NO, NO, NO, NO, NO, NO),
    "fail": (failing("second", HOME), failing("second"), failing("second"), (), (), (), ()),
    "peer_failed": (failing("second", HOME), failing("second"), failing("second"), (), (), (), ()),
    "drained 0": (failing(STOPPED, HOME), failing(STOPPED), failing(STOPPED), (), (), (), ()),
    "gone 0": (failing(GONE, HOME), failing(GONE), failing(GONE), (), (), (), ()),
}


def test_the_table_has_each_event_in_each_state() -> None:
    assert TABLE.keys() == EVENTS.keys()
    assert all(len(row) == len(STATES) for row in TABLE.values())


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_event_in_state(state: Callable[[], Machine], event: str) -> None:
    receiving = state()
    before = receiving.status
    expected = TABLE[event][STATES.index(state)]
    if expected == NO:
        with pytest.raises(ProtocolError):
            EVENTS[event](receiving)
        assert receiving.status is before
        return
    actions = EVENTS[event](receiving)
    assert actions == expected
    if Settle(None) in actions:
        assert receiving.status is COMPLETE
    elif any(isinstance(action, Settle) for action in actions):
        assert receiving.status is FAILED
        assert receiving.reason in ("second", STOPPED, GONE)
    else:
        assert receiving.status is (OPEN if event == "bound" else before)
    if before is FAILED:
        assert receiving.reason == "first"


def test_units_come_home_when_all_have_drained_and_nothing_is_merged() -> None:
    receiving = failed_merging()
    assert receiving.may_write == {0}
    assert receiving.merging == {(0, 0)}
    assert receiving.drained(0) == ()
    assert not receiving.units_home
    assert receiving.merged(0, 0) == (ReturnUnits(),)
    assert receiving.units_home
    assert receiving.drained(0) == receiving.gone(1) == ()


def test_the_last_source_brings_the_units_home() -> None:
    receiving = failed_merging()
    assert receiving.merged(0, 0) == ()
    assert receiving.gone(0) == (ReturnUnits(),)
    assert receiving.may_write == frozenset()


def test_who_may_write() -> None:
    assert queued().may_write == failed_unbound().may_write == complete().may_write == frozenset()
    assert opened().may_write == failed().may_write == BOTH
    assert complete().units_home
    assert failed_unbound().units_home


def test_acks_are_cumulative_and_merges_may_end_in_any_order() -> None:
    receiving = opened()
    for seq in (1, 0):
        receiving.ready(0, seq, f"piece {seq}", frozenset({0}))
    assert receiving.merged(0, 1) == ()
    assert receiving.merged(0, 0) == (Ack(0, 2),)
    with pytest.raises(ProtocolError, match="no merge of piece 0"):
        receiving.merged(0, 0)


def test_repetitions_change_nothing_before_and_after_the_merge() -> None:
    receiving = merging()
    receiving_again = opened()
    assert receiving_again.ready(0, 0, "K", BOTH) == receiving_again.ready(0, 0, "K", BOTH) == ()
    assert receiving.ready(1, 0, "K", BOTH) == receiving.total(0, 1) == receiving.first_generation(None) == ()
    receiving = opened()
    receiving.ready(0, 0, "K", frozenset({0}))
    receiving.merged(0, 0)
    assert receiving.ready(0, 0, "K", frozenset({0})) == ()
    with pytest.raises(ProtocolError, match="is V of"):
        receiving.ready(0, 0, "V", frozenset({0}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, "K", BOTH), "source 2 is none of"),
        ((1, 0, "K", frozenset({0})), "shared by"),
        ((1, 0, "K", frozenset({1, 2})), "shared by"),
        ((1, 0, "V", BOTH), "is V of"),
        ((1, 0, "K", frozenset({1})), "is K of \\[1\\]"),
        ((0, 2, "K", BOTH), "window is 2"),
        ((0, -1, "K", BOTH), "window is 2"),
    ],
)
def test_an_announcement_that_cannot_be(arguments: tuple[Any, ...], message: str) -> None:
    receiving = opened()
    receiving.ready(0, 0, "K", BOTH)
    with pytest.raises(ProtocolError, match=message):
        receiving.ready(*arguments)
    assert receiving.ready(1, 0, "K", BOTH) == (Merge(0, 0, "K"),)


def test_totals_must_agree() -> None:
    receiving = opened()
    receiving.ready(0, 1, "K", BOTH)
    with pytest.raises(ProtocolError, match="but 2 were announced"):
        receiving.total(0, 1)
    receiving.total(0, 2)
    with pytest.raises(ProtocolError, match="was 2 before"):
        receiving.total(1, 3)
    with pytest.raises(ProtocolError, match="was 2 before"):
        receiving.first_generation({0: 1})
    with pytest.raises(ProtocolError, match="stage 1, there are 1"):
        receiving.first_generation({1: 2})
    closed = opened()
    closed.first_generation({0: 1})
    with pytest.raises(ProtocolError, match="piece 1 of the 1"):
        closed.ready(0, 1, "K", BOTH)
    with pytest.raises(ProtocolError, match="were announced"):
        opened().total(0, -1)


@pytest.mark.parametrize("late", ["total 0", "total 1", "first_generation", "merged"])
def test_complete_when_nothing_is_missing_whatever_comes_last(late: str) -> None:
    receiving = opened()
    receiving.ready(0, 0, "K", frozenset({0}))
    events: dict[str, Callable[[], tuple[Any, ...]]] = {
        "total 0": lambda: receiving.total(0, 1),
        "total 1": lambda: receiving.total(1, 1),
        "first_generation": lambda: receiving.first_generation(None),
        "merged": lambda: receiving.merged(0, 0),
    }
    for name, event in events.items():
        if name != late:
            assert Settle(None) not in event()
    assert receiving.status is OPEN
    assert events[late]()[-2:] == (Settle(None), ReturnUnits())


def test_a_stage_without_pieces() -> None:
    receiving: Machine = Receiving((Stage((0,), 1), Stage((1,), 1)))
    receiving.bound()
    receiving.first_generation({0: 0, 1: 0})
    assert receiving.total(0, 0) == ()
    assert receiving.total(1, 0) == (Settle(None), ReturnUnits())


def reading() -> Machine:
    receiving: Machine = Receiving((Stage((0,), 1),), pulls=True)
    receiving.bound()
    receiving.first_generation(None)
    assert receiving.total(0, 0) == (Pull(),)
    assert receiving.pulling
    return receiving


def test_what_is_read_comes_after_the_last_piece() -> None:
    receiving = reading()
    assert receiving.first_generation(None) == receiving.total(0, 0) == ()
    assert receiving.pulled() == (Settle(None), ReturnUnits())


def test_units_are_not_home_while_they_are_read_into() -> None:
    receiving = reading()
    receiving.fail("aborted")
    assert receiving.drained(0) == ()
    assert receiving.pulled() == (ReturnUnits(),)
    assert receiving.status is FAILED


def test_no_read_begins_after_a_failure() -> None:
    receiving: Machine = Receiving((Stage((0,), 1),), pulls=True)
    receiving.bound()
    receiving.fail("aborted")
    assert receiving.first_generation(None) == receiving.total(0, 0) == ()
    assert not receiving.pulling


@pytest.mark.parametrize("event", ["peer_failed", "drained", "gone"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_an_unknown_source_is_refused(state: Callable[[], Machine], event: str) -> None:
    arguments = ("why",) if event == "peer_failed" else ()
    with pytest.raises(ProtocolError, match="source 7 is none of"):
        getattr(state(), event)(7, *arguments)


@pytest.mark.parametrize(
    "stages", [(), (Stage((), 1),), (Stage((0,), 0),), (Stage((0,), 1), Stage((0,), 1)), (Stage((0, 0), 1),)]
)
def test_impossible_stages_are_refused(stages: tuple[Stage, ...]) -> None:
    with pytest.raises(ProtocolError):
        Receiving(stages)


def test_repetitions_are_no_news() -> None:
    receiving = opened()
    seen = [receiving.news]
    for event in (
        lambda: receiving.ready(0, 0, "K", BOTH),
        lambda: receiving.ready(1, 0, "K", BOTH),
        lambda: receiving.total(0, 2),
        lambda: receiving.total(1, 2),
        lambda: receiving.first_generation({0: 2}),
    ):
        event()
        seen.append(receiving.news)
        event()
        assert receiving.news == seen[-1]
    receiving.merged(0, 0)
    seen.append(receiving.news)
    receiving.ready(0, 0, "K", BOTH)
    assert receiving.news == seen[-1]
    receiving.fail("why")
    seen.append(receiving.news)
    receiving.ready(0, 1, "K", BOTH)
    receiving.total(0, 2)
    assert receiving.news == seen[-1]
    receiving.drained(0)
    seen.append(receiving.news)
    receiving.drained(0)
    assert receiving.news == seen[-1]
    assert seen == sorted(set(seen)), "something new was not seen"


def test_what_is_lacking_when_all_has_arrived_is_a_failure() -> None:
    """Its sources have to drain like those of any other request that fails."""
    lacking = ["the last page"]
    receiving: Machine = Receiving((Stage((0,), 1),), lacking=lambda: lacking[0])
    receiving.bound()
    receiving.first_generation(None)
    assert receiving.total(0, 0) == (Settle("the last page"),)
    assert receiving.status is FAILED
    assert receiving.drained(0) == (ReturnUnits(),)
    lacking[0] = ""
    receiving = Receiving((Stage((0,), 1),), lacking=lambda: lacking[0])
    receiving.bound()
    receiving.first_generation(None)
    assert receiving.total(0, 0) == (Settle(None), ReturnUnits())


def test_what_was_acknowledged_last() -> None:
    receiving: Machine = Receiving((Stage((0,), 2), Stage((1,), 2)))
    receiving.bound()
    receiving.ready(1, 0, "K", frozenset({1}))
    receiving.merged(1, 0)
    assert receiving.acknowledged == (0, 1)
    receiving.fail("why")
    assert not receiving.acknowledged
