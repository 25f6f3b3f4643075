"""A process that was stopped hears what came meanwhile before it blames a peer for being still."""

from sglang_hetero.transfer.lifetime.stillness import AWAY_SECONDS, CATCH_UP_SECONDS, Stillness

LIMIT = 4.0
OFTEN = AWAY_SECONDS / 4


def looks(stillness: Stillness, *times: float, progress: float = 0.0) -> list[bool]:
    return [stillness.too_long(now, now - progress, LIMIT) for now in times]


def often(until: float) -> list[float]:
    return [OFTEN * number for number in range(1, round(until / OFTEN) + 1)]


def test_who_looks_all_the_time_needs_no_more_than_the_limit() -> None:
    found = looks(Stillness(), *often(LIMIT + 2 * OFTEN))
    assert found == [False] * (len(found) - 2) + [True] * 2


def test_behind_a_pause_there_is_time_to_hear_what_came() -> None:
    stillness = Stillness()
    assert not any(looks(stillness, *often(1.0), 9.0, 9.1))
    assert not any(looks(stillness, 9.2, 12.9, progress=9.15)), "it was heard"
    assert looks(stillness, 13.2, 13.3, progress=9.15) == [True, True]


def test_behind_a_pause_who_says_nothing_still_fails() -> None:
    stillness = Stillness()
    assert looks(stillness, *often(1.0), 9.0, 9.0 + CATCH_UP_SECONDS / 2, 9.0 + CATCH_UP_SECONDS)[-3:] == [
        False,
        False,
        True,
    ]


def test_a_scheduler_that_looks_seldom_does_not_put_it_off_for_ever() -> None:
    seldom = 2 * AWAY_SECONDS
    assert looks(Stillness(), *(seldom * number for number in range(1, 5))) == [False, False, False, True]


def test_a_second_pause_has_time_of_its_own() -> None:
    stillness = Stillness()
    assert not any(looks(stillness, 9.0))
    assert not any(looks(stillness, 9.5, progress=9.4))
    assert not any(looks(stillness, 20.0, progress=9.4))
