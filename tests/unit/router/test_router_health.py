"""The state machine of one server's health, with a clock of its own."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_hetero.router.health import Health, Limits, State

LIMITS = Limits(failures=3, successes=2, interval=10.0, backoff=1.0, max_backoff=8.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fresh() -> tuple[Health, Clock]:
    clock = Clock()
    return Health(LIMITS, clock), clock


def healthy() -> tuple[Health, Clock]:
    health, clock = fresh()
    health.probe_answered()
    return health, clock


def evicted() -> tuple[Health, Clock]:
    health, clock = healthy()
    for _ in range(3):
        health.probe_failed("no answer")
    return health, clock


def test_a_new_server_is_asked_at_once_and_is_second_choice_until_it_answers() -> None:
    health, clock = fresh()
    assert (health.state, health.tier, health.next_probe) == (State.PROBING, 1, clock.now)
    health.probe_answered()
    assert (health.state, health.tier, health.next_probe) == (State.HEALTHY, 0, clock.now + 10)


def test_a_new_server_that_does_not_answer_gets_no_requests() -> None:
    health, clock = fresh()
    health.probe_failed("connection refused")
    assert (health.state, health.tier, health.cause) == (State.EVICTED, None, "connection refused")
    assert health.next_probe == clock.now + 1


def test_a_new_server_that_serves_a_request_is_healthy() -> None:
    health, _ = fresh()
    health.request_succeeded()
    assert health.state is State.HEALTHY


def test_probes_that_fail_in_a_row_evict() -> None:
    health, clock = healthy()
    for count in (1, 2):
        health.probe_failed("no answer")
        assert (health.state, health.tier) == (State.SUSPECT, 1), count
        assert health.next_probe == clock.now + 1
    health.probe_failed("no answer")
    assert (health.state, health.tier) == (State.EVICTED, None)


def test_an_evicted_server_is_asked_as_often_as_a_healthy_one_at_least() -> None:
    clock = Clock()
    health = Health(Limits(interval=3.0, backoff=1.0, max_backoff=8.0), clock)
    waits = []
    for _ in range(5):
        health.probe_failed("connection refused")
        waits.append(health.next_probe - clock.now)
    assert waits == [1, 2, 3, 3, 3]


def test_only_failures_in_a_row_count() -> None:
    health, _ = healthy()
    for _ in range(10):
        health.probe_failed("no answer")
        health.probe_failed("no answer")
        health.probe_answered()
        assert health.state is State.HEALTHY


def test_lost_connections_and_failed_probes_count_together() -> None:
    health, _ = healthy()
    health.request_failed("reset", lost=True)
    health.probe_failed("no answer")
    health.request_failed("reset", lost=True)
    assert health.state is State.EVICTED


def test_requests_that_fail_make_suspect_and_never_evict() -> None:
    health, _ = healthy()
    for _ in range(50):
        health.request_failed("the hand-over failed", lost=False)
        assert (health.state, health.tier) == (State.SUSPECT, 1)


def test_a_suspect_server_waits_longer_each_time_although_it_answers() -> None:
    health, clock = healthy()
    for wait in (1, 2, 4, 8, 8):
        health.request_failed("the hand-over failed", lost=False)
        assert health.next_probe <= clock.now
        clock.now += wait - 0.5
        health.probe_answered()
        assert health.state is State.SUSPECT
        clock.now += 0.5
        health.probe_answered()
        assert health.state is State.HEALTHY
    health.request_succeeded()
    health.request_failed("once more", lost=False)
    clock.now += 1
    health.probe_answered()
    assert health.state is State.HEALTHY, "a request that succeeded did not end the row"


def test_a_request_that_succeeds_heals_a_suspect() -> None:
    health, _ = healthy()
    health.request_failed("the hand-over failed", lost=False)
    health.request_succeeded()
    assert health.state is State.HEALTHY


def test_an_evicted_server_is_asked_less_and_less_often() -> None:
    health, clock = evicted()
    waits = []
    for _ in range(6):
        waits.append(health.next_probe - clock.now)
        clock.now = health.next_probe
        health.probe_failed("no answer")
    assert waits == [1, 2, 4, 8, 8, 8]


def test_an_evicted_server_returns_after_several_answers() -> None:
    health, clock = evicted()
    health.probe_answered()
    assert (health.state, health.tier, health.next_probe) == (State.PROBING, None, clock.now + 1)
    health.probe_answered()
    assert (health.state, health.tier) == (State.HEALTHY, 0)
    # and begins with a short back-off next time
    for _ in range(3):
        health.probe_failed("no answer")
    assert health.next_probe == clock.now + 1


def test_one_answer_between_failures_does_not_bring_it_back() -> None:
    health, _ = evicted()
    for _ in range(5):
        health.probe_answered()
        assert health.state is State.PROBING
        health.probe_failed("no answer")
        assert health.state is State.EVICTED


def test_requests_that_were_under_way_do_not_bring_an_evicted_server_back() -> None:
    health, clock = evicted()
    due = health.next_probe
    health.request_succeeded()
    health.request_failed("reset", lost=True)
    health.request_failed("aborted", lost=False)
    assert (health.state, health.next_probe) == (State.EVICTED, due)
    assert due > clock.now


EVENTS = st.lists(
    st.sampled_from(["answered", "silent", "good", "bad", "lost", "wait"]),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_a_server_that_is_well_again_gets_requests_in_the_end(events: list[str]) -> None:
    health, clock = fresh()
    for event in events:
        if event == "answered":
            health.probe_answered()
        elif event == "silent":
            health.probe_failed("no answer")
        elif event == "good":
            health.request_succeeded()
        elif event == "wait":
            clock.now += 3
        else:
            health.request_failed("it broke", lost=event == "lost")
        assert health.next_probe <= clock.now + LIMITS.interval
        may = {State.HEALTHY: (0,), State.SUSPECT: (1,), State.EVICTED: (None,), State.PROBING: (1, None)}
        assert health.tier in may[health.state]
        assert health.state is State.HEALTHY or health.cause
    for _ in range(12):  # it answers each probe when it is due
        clock.now = max(clock.now, health.next_probe)
        health.probe_answered()
    assert (health.state, health.tier) == (State.HEALTHY, 0)


def test_a_failure_that_was_the_requests_own_is_taken_back() -> None:
    health, _ = healthy()
    health.request_failed("x", lost=False)
    assert health.state is State.SUSPECT
    health.request_excused()
    assert (health.state, health.cause) == (State.HEALTHY, "")
    # Others that failed still count, and so does a connection that broke.
    for lost in (False, True):
        health.request_failed("y", lost=lost)
        health.request_failed("x", lost=False)
        health.request_excused()
        assert health.state is State.SUSPECT
        health.request_succeeded()
