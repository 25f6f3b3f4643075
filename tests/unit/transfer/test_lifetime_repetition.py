"""When something is said again."""

import pytest

from sglang_hetero.transfer.lifetime import Repetition
from sglang_hetero.transfer.lifetime.repetition import FIRST_SECONDS, MOST_SECONDS

START = 100.0


def said(repetition: Repetition, until: float, progress: float = START, step: float = 0.25) -> list[float]:
    """When it was, looking every `step` seconds."""
    moments = [START + number * step for number in range(int((until - START) / step) + 1)]
    return [now for now in moments if repetition.due(now, min(progress, now))]


def test_after_a_while_and_then_less_and_less_often() -> None:
    waits = [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS, 8 * FIRST_SECONDS, MOST_SECONDS, MOST_SECONDS]
    assert waits[3] == MOST_SECONDS, "or this test says something else"
    at = said(Repetition(), START + sum(waits))
    assert at == pytest.approx([START + sum(waits[: count + 1]) for count in range(len(waits))])


def test_what_goes_on_is_not_said_again() -> None:
    repetition = Repetition()
    assert not any(repetition.due(START + number, START + number) for number in range(100))


def test_something_new_begins_anew() -> None:
    repetition = Repetition()
    assert len(said(repetition, START + 30)) == 4
    assert not repetition.due(START + 31, START + 31)
    assert not repetition.due(START + 31 + FIRST_SECONDS - 0.1, START + 31)
    assert repetition.due(START + 31 + FIRST_SECONDS, START + 31)


def test_looking_seldom_says_it_once() -> None:
    repetition = Repetition()
    assert repetition.due(START + 1000, START)
    assert not repetition.due(START + 1000, START)
