"""What follows from the reports of a server's ranks."""

import pytest

from sglang_hetero.errors import StateError
from sglang_hetero.state.report import STALE_SECONDS, Control, Report, decode_report, decode_state, encode, state_of

NOW = 1000.0


def report(**fields: object) -> Report:
    return Report(**{"side": "decode", "rank": "decode TP0/1 (h:1)", "pid": 7, "beat": NOW - 0.5, **fields})  # type: ignore[arg-type]


def state(*reports: Report, gone: tuple[int, ...] = (), **fields: object):
    given = {"mode": "auto", "side": "decode", "now": NOW, "alive": lambda pid: pid not in gone, **fields}
    return state_of(reports, **given)  # type: ignore[arg-type]


def test_a_server_whose_ranks_are_well():
    found = state(report(tp_rank=1, pid=9), report(), control=Control(port=5))
    assert found.ok and found.faults == []
    assert [(one.tp_rank, one.age) for one in found.ranks] == [(0, 0.5), (1, 0.5)]


def test_a_server_nobody_has_reported_of_is_well():
    """It starts, or takes SGLang's path only."""
    assert state().ok


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (lambda: state(report(faults=["a unit is lost"])), "decode TP0/1 (h:1): a unit is lost"),
        (lambda: state(report(), gone=(7,)), "decode TP0/1 (h:1): its process 7 is gone"),
        (
            lambda: state(report(beat=NOW - STALE_SECONDS - 1)),
            f"decode TP0/1 (h:1) (process 7) has not reported for {STALE_SECONDS + 1:.0f} s",
        ),
        (
            lambda: state(report(), control=Control(fault="the control service has ended")),
            "the control service has ended",
        ),
    ],
    ids=["a rank's fault", "gone", "silent", "control"],
)
def test_what_is_wrong(found, fault):
    assert (found().ok, found().faults) == (False, [fault])


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (lambda: state(report(), problems=["a report is torn"]), "a report is torn"),
        (lambda: state(report(problems=["no books"])), "decode TP0/1 (h:1): no books"),
        (
            lambda: state(report(beat=NOW - STALE_SECONDS - 1), believed=False),
            f"decode TP0/1 (h:1) (process 7) has not reported for {STALE_SECONDS + 1:.0f} s",
        ),
    ],
    ids=["unreadable", "a rank that cannot be looked at", "silent because the disk is full"],
)
def test_what_is_not_known_is_no_fault(found, problem):
    assert (found().ok, found().faults, found().problems) == (True, [], [problem])


def test_a_process_that_is_gone_is_a_fault_whatever_can_be_written():
    assert not state(report(beat=NOW - STALE_SECONDS - 1), gone=(7,), believed=False).ok


def test_a_rank_that_was_late_is_well_up_to_the_limit():
    assert state(report(beat=NOW - STALE_SECONDS)).ok


def test_a_report_and_a_state_come_back_as_they_were():
    one = report(
        ours={"units": 3}, sglang={"pages": 1}, process={"threads": 5}, threads=["hetero-watch"], in_doubt=["x"]
    )
    assert decode_report(encode(one)) == one
    whole = state(one, control=Control(counts={"bad Hello": 2}))
    assert decode_state(encode(whole)) == whole


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"side": 1}', b"\xff", b'{"side": "decode", "rank": "x"}'])
def test_other_bytes_are_refused(data):
    with pytest.raises(StateError):
        decode_report(data)
    with pytest.raises(StateError):
        decode_state(data)


def test_fields_of_a_later_release_are_no_error():
    assert decode_report(b'{"side": "decode", "rank": "x", "pid": 1, "later": {}}').pid == 1
