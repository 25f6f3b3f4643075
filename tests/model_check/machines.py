"""Real objects as values of a state: each state of an object that occurs gets a number, each step is made once."""

import copy
from collections import deque
from collections.abc import Hashable
from typing import Any

from sglang_hetero.errors import ProtocolError


class Violation(AssertionError):
    """Something that must never happen did; `trace` is filled in by the explorer."""


class Refused(Violation):
    """A machine raised ProtocolError."""


class Machines:
    """Objects by number. A call gives the number of what the object has become; the object itself stays as it is."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[Hashable, tuple[int, Any]] = {}

    def add(self, machine: object) -> int:
        """The number of a machine in this state."""
        frozen = freeze(machine)
        if frozen not in self._numbers:
            self._numbers[frozen] = len(self._objects)
            self._objects.append(machine)
        return self._numbers[frozen]

    def look(self, number: int) -> Any:
        """The machine with this number, to be read only."""
        return self._objects[number]

    def call(self, number: int, event: str, *arguments: Any) -> tuple[int, Any]:
        """Number after the event, and what it returned. ProtocolError becomes `Refused`: all peers are honest."""
        key = (number, event, arguments)
        if key not in self._steps:
            machine = copy.deepcopy(self._objects[number])
            try:
                result = getattr(machine, event)(*arguments)
            except ProtocolError as error:
                raise Refused(f"{type(machine).__name__}.{event}{arguments}: {error}") from error
            self._steps[key] = self.add(machine), result
        return self._steps[key]


def freeze(value: Any) -> Hashable:
    """A hashable value that is equal for equal states."""
    if isinstance(value, dict):
        return ("dict", frozenset((freeze(key), freeze(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return frozenset(freeze(item) for item in value)
    if isinstance(value, list | tuple | deque):
        return tuple(freeze(item) for item in value)
    if hasattr(value, "__dict__") and not isinstance(value, str | type):
        return (type(value).__name__, freeze(vars(value)))
    return value  # type: ignore[no-any-return]
