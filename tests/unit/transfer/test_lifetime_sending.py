"""Sending and Epochs: each event in each state."""

from collections.abc import Callable

import pytest

from sglang_hetero.errors import ProtocolError
from sglang_hetero.transfer.lifetime import Epochs, Sending, SendingStatus

WINDOW = 2


def fresh() -> Sending:
    return Sending(WINDOW)


def produced() -> Sending:
    sending = fresh()
    sending.produced(3, ())
    return sending


def in_flight() -> Sending:
    sending = produced()
    assert sending.take(1) == range(1)
    return sending


def written() -> Sending:
    """Closed with one piece, which is announced."""
    sending = fresh()
    sending.produced(1, ())
    sending.close()
    sending.take(1)
    sending.wrote()
    return sending


def finished() -> Sending:
    sending = written()
    sending.finished()
    return sending


def failed() -> Sending:
    sending = produced()
    sending.abort("first")
    return sending


def failed_in_flight() -> Sending:
    sending = in_flight()
    sending.abort("first")
    return sending


REFUSED = "ProtocolError"
SENDING, FINISHED, FAILED = SendingStatus
STATES = (fresh, produced, in_flight, written, finished, failed, failed_in_flight)
EVENTS: dict[str, Callable[[Sending], object]] = {
    "produced": lambda sending: sending.produced(1, ()),
    "close": lambda sending: sending.close(),
    "acked 0": lambda sending: sending.acked(0),
    "acked 1": lambda sending: sending.acked(1),
    "take": lambda sending: sending.take(1),
    "wrote": lambda sending: sending.wrote(),
    "write_failed": lambda sending: sending.write_failed("second"),
    "finished": lambda sending: sending.finished(),
    "abort": lambda sending: sending.abort("second"),
}
# Status after the event, in the order of STATES.
TABLE = {
    "produced": (SENDING, SENDING, SENDING, REFUSED, FINISHED, FAILED, FAILED),
    "close": (SENDING, SENDING, SENDING, SENDING, FINISHED, FAILED, FAILED),
    "acked 0": (SENDING, SENDING, SENDING, SENDING, FINISHED, FAILED, FAILED),
    "acked 1": (SENDING, REFUSED, REFUSED, SENDING, FINISHED, FAILED, FAILED),
    "take": (SENDING, SENDING, SENDING, SENDING, FINISHED, FAILED, FAILED),
    "wrote": (REFUSED, REFUSED, SENDING, REFUSED, REFUSED, REFUSED, FAILED),
    "write_failed": (REFUSED, REFUSED, FAILED, REFUSED, REFUSED, REFUSED, FAILED),
    "finished": (REFUSED, REFUSED, REFUSED, FINISHED, FINISHED, FAILED, FAILED),
    "abort": (FAILED, FAILED, FAILED, FAILED, FINISHED, FAILED, FAILED),
}


def test_the_table_has_each_event_in_each_state() -> None:
    assert TABLE.keys() == EVENTS.keys()
    assert all(len(row) == len(STATES) for row in TABLE.values())


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_event_in_state(state: Callable[[], Sending], event: str) -> None:
    sending = state()
    before = vars(sending).copy()
    expected = TABLE[event][STATES.index(state)]
    if expected is REFUSED and event != "acked 1":
        with pytest.raises(ProtocolError):
            EVENTS[event](sending)
        assert sending.status is before["_status"]
        return
    if expected is REFUSED:
        with pytest.raises(ProtocolError, match="not written"):
            EVENTS[event](sending)
        assert sending.acknowledged == 0
        return
    EVENTS[event](sending)
    assert sending.status is expected
    if before["_status"] is FAILED:
        assert sending.reason == "first"
    elif sending.status is FAILED:
        assert sending.reason == "second"
    if sending.status is not SENDING:
        assert not sending.runnable
        assert sending.take(1) == range(0)
        assert sending.drained is not sending.in_flight


def test_the_window_bounds_what_may_be_written() -> None:
    sending = fresh()
    sending.produced(5, ())
    assert sending.take(9) == range(2)
    assert sending.take(9) == range(0), "one batch at a time"
    assert sending.in_flight
    sending.wrote()
    assert not sending.runnable
    sending.acked(1)
    assert sending.take(9) == range(2, 3)
    sending.wrote()
    sending.acked(3)
    assert sending.acknowledged == 3
    sending.acked(2)
    assert sending.acknowledged == 3
    assert sending.take(1) == range(3, 4)
    assert sending.take(0) == range(0)


def test_the_total_is_known_when_the_stage_is_closed() -> None:
    sending = produced()
    assert sending.total is None
    sending.close()
    sending.close()
    assert sending.total == 3


def test_a_source_without_a_share_may_be_overtaken() -> None:
    sending = fresh()
    sending.produced(2, (0, 1))
    sending.acked(4)  # two more, which are not even here yet
    sending.produced(3, (0, 1))
    with pytest.raises(ProtocolError, match="piece 4 was not written"):
        sending.acked(5)
    assert sending.take(9) == range(5)
    sending.wrote()
    sending.close()
    sending.acked(5)
    sending.finished()
    assert sending.status is FINISHED


def test_an_early_ack_of_what_turns_out_to_be_its_own_is_refused() -> None:
    sending = fresh()
    sending.acked(1)
    with pytest.raises(ProtocolError, match="piece 0 was not written"):
        sending.produced(1, ())


def test_an_ack_beyond_the_total_is_refused() -> None:
    early = fresh()
    early.acked(1)
    with pytest.raises(ProtocolError, match="only 0"):
        early.close()
    with pytest.raises(ProtocolError, match="only 1"):
        written().acked(2)


def test_finished_needs_no_walk_over_what_others_send() -> None:
    sending = fresh()
    sending.produced(3, (0, 1, 2))
    sending.close()
    assert sending.take(1) == range(1)
    sending.finished()
    assert sending.in_flight
    sending.wrote()
    assert sending.drained


def test_a_write_in_doubt_never_drains() -> None:
    sending = in_flight()
    sending.write_failed("time is up", in_doubt=True)
    assert (sending.status, sending.reason) == (FAILED, "time is up")
    assert not sending.drained
    sending.abort("peer")
    assert not sending.drained


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_has_units(window: int) -> None:
    with pytest.raises(ProtocolError):
        Sending(window)


@pytest.mark.parametrize(("count", "skipped"), [(-1, ()), (1, (1,)), (1, (-1,))])
def test_impossible_pieces_are_refused(count: int, skipped: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        fresh().produced(count, skipped)


def test_a_bind_opens_its_room_once() -> None:
    epochs = Epochs(keep=8)
    assert epochs.open("d", room=1, epoch=0)
    assert not epochs.open("d", room=1, epoch=0)
    assert epochs.open("d", room=1, epoch=2)
    assert not epochs.open("d", room=1, epoch=1)
    assert epochs.open("d", room=2, epoch=0)
    assert epochs.open("another process", room=1, epoch=0)


def test_a_bind_behind_its_abort_opens_nothing() -> None:
    epochs = Epochs(keep=8)
    epochs.end("d", room=1, epoch=3)
    epochs.end("d", room=1, epoch=2)
    assert not epochs.open("d", room=1, epoch=3)
    assert epochs.open("d", room=1, epoch=4)


def test_rooms_used_last_are_remembered() -> None:
    epochs = Epochs(keep=2)
    for room in (1, 2, 1, 3):
        epochs.open("d", room, epoch=0)
    assert not epochs.open("d", room=1, epoch=0)
    assert epochs.open("d", room=2, epoch=0)


def test_what_was_only_passed_over_is_never_in_doubt() -> None:
    """Nothing of it was given to the engine: a destination that has finished meanwhile is not waited for."""
    sending = fresh()
    sending.produced(1, (0,))
    sending.close()
    assert sending.take(1) == range(1)
    sending.finished()
    sending.write_failed("the digests", in_doubt=True)
    assert sending.drained
    assert not sending.in_doubt
    sending = in_flight()
    sending.write_failed("engine", in_doubt=True)
    assert not sending.drained


def test_what_is_announced_and_not_acknowledged() -> None:
    sending = fresh()
    assert sending.announced == range(0)
    sending.produced(3, ())
    sending.take(1)
    assert not sending.announced, "it is being written"
    sending.wrote()
    sending.take(1)
    assert sending.announced == range(1)
    sending.wrote()
    assert sending.announced == range(2)
    sending.acked(1)
    assert sending.announced == range(1, 2)
    sending.take(1)
    sending.take_back()
    assert sending.announced == range(1, 2)


def test_repetitions_are_no_news() -> None:
    sending = fresh()
    seen = [sending.news]
    sending.produced(1, ())
    seen.append(sending.news)
    sending.close()
    seen.append(sending.news)
    sending.close()
    assert sending.news == seen[-1]
    sending.take(1)
    sending.wrote()
    seen.append(sending.news)
    sending.acked(1)
    seen.append(sending.news)
    sending.acked(1)
    sending.acked(0)
    assert sending.news == seen[-1]
    sending.finished()
    seen.append(sending.news)
    sending.finished()
    sending.abort("late")
    assert sending.news == seen[-1]
    assert seen == sorted(set(seen)), "something new was not seen"
