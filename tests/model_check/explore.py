"""Visit every reachable state of a setup, or walk through one at random; see that there is always a way to the end."""

import gc
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .machines import Violation
from .model import Event, Model
from .setup import Setup
from .state import State

FAULT_SHARES = (0.0, 0.02, 0.1)
"""Of the events of a walk, how many are chosen among all and not only among those that are no fault; one for a walk."""


@dataclass(frozen=True)
class Report:
    """What an exploration saw."""

    states: int
    steps: int
    finals: int
    succeeded: int
    """Final states in which all requests were handed over."""


def explore(setup: Setup, limit: int) -> Report:
    """All reachable states, breadth first, so that a violation comes with a shortest trace. At most `limit` states.

    Raises Violation: something forbidden happened, or from some state no way without a fault leads to a final one.
    """
    with _no_garbage():
        return _explore(setup, limit)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """States are tuples without cycles; looking for those again and again takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _explore(setup: Setup, limit: int) -> Report:
    model = Model(setup)
    numbers: dict[State, int] = {model.initial: 0}
    came_from: list[tuple[int, Event]] = [(-1, ())]
    before: list[list[int]] = [[]]
    finals: list[int] = []
    steps = succeeded = 0
    todo = deque([model.initial])
    while todo:
        state = todo.popleft()
        number = numbers[state]
        try:
            outcomes = model.events(state)
            if final := model.final(state):
                model.check_end(state)
        except Violation as violation:
            raise Violation(f"{setup.name}: {violation}, after\n{_trace(came_from, number)}") from violation
        if final:
            finals.append(number)
            succeeded += model.succeeded(state)
        for event, following, fault in outcomes:
            steps += 1
            target = numbers.setdefault(following, len(numbers))
            if target == len(came_from):
                if target >= limit:
                    raise MemoryError(f"{setup.name}: more than {limit} states")
                came_from.append((number, event))
                before.append([])
                todo.append(following)
            if not fault:
                before[target].append(number)
    _check_ways_out(setup, came_from, before, finals)
    return Report(len(numbers), steps, len(finals), succeeded)


def walk(setup: Setup, seed: int, limit: int) -> bool:
    """One run, each event by chance, to its end; whether all requests succeeded. Raises Violation like `explore`."""
    chance, model = random.Random(seed), Model(setup, ordered=True)
    state, trace = model.initial, list[Event]()
    share = chance.choice(FAULT_SHARES)
    for _ in range(limit):
        try:
            outcomes = model.events(state)
        except Violation as violation:
            raise Violation(f"{setup.name}, seed {seed}: {violation}, after {trace}") from violation
        if not outcomes:
            if not model.final(state):
                raise Violation(f"{setup.name}, seed {seed}: no way out after {trace}")
            return model.succeeded(state)
        calm = [outcome for outcome in outcomes if not outcome[2]]
        event, state, _ = chance.choice(calm if calm and chance.random() >= share else outcomes)
        trace.append(event)
    raise Violation(f"{setup.name}, seed {seed}: no end after {limit} steps")


def _check_ways_out(
    setup: Setup, came_from: list[tuple[int, Event]], before: list[list[int]], finals: list[int]
) -> None:
    saved, todo = set(finals), list(finals)
    while todo:
        for earlier in before[todo.pop()]:
            if earlier not in saved:
                saved.add(earlier)
                todo.append(earlier)
    lost = next((number for number in range(len(came_from)) if number not in saved), None)
    if lost is not None:
        raise Violation(f"{setup.name}: no way out after\n{_trace(came_from, lost)}")


def _trace(came_from: list[tuple[int, Event]], number: int) -> str:
    events = []
    while number > 0:
        number, event = came_from[number]
        events.append("  " + " ".join(map(str, event)))
    return "\n".join(reversed(events))
