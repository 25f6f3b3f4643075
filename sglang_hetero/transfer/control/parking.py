"""Messages for ranks that are not connected at the moment. No sockets, no clock: time is passed in."""

from collections import OrderedDict, deque
from collections.abc import Callable


class Parking:
    """Payloads by identity, first in, first out; bounded in time, number and bytes, the oldest goes first."""

    def __init__(self, seconds: float, messages: int, nbytes: int) -> None:
        self._seconds, self._messages, self._limit = seconds, messages, nbytes
        self._next = 0
        self._held: OrderedDict[int, tuple[float, bytes, bytes]] = (
            OrderedDict()
        )  # number: (deadline, identity, payload)
        self._numbers: dict[bytes, deque[int]] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._numbers

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def add(self, identity: bytes, payload: bytes, now: float) -> int:
        """Park it; returns how many older ones had to go. What is parked for the identity already is not kept twice."""
        for number in self._numbers.get(identity, ()):
            if self._held[number][2] == payload:
                self._drop(number)  # the repetition is the newer one: it must not overtake what came between
                break
        self._held[self._next] = (now + self._seconds, identity, payload)
        self._numbers.setdefault(identity, deque()).append(self._next)
        self._next += 1
        self._nbytes += len(payload)
        dropped = 0
        while len(self._held) > self._messages or self._nbytes > self._limit:
            self._drop(next(iter(self._held)))
            dropped += 1
        return dropped

    def deliver(self, identity: bytes, send: Callable[[bytes], bool]) -> None:
        """Hand over what is parked for an identity until `send` says that it could not."""
        while identity in self._numbers:
            number = self._numbers[identity][0]
            if not send(self._held[number][2]):
                return
            self._drop(number)

    def expire(self, now: float) -> int:
        """Drop what has waited too long; returns how many."""
        dropped = 0
        while self._held:
            number, (deadline, _, _) = next(iter(self._held.items()))
            if deadline > now:
                break
            self._drop(number)
            dropped += 1
        return dropped

    def _drop(self, number: int) -> None:
        _, identity, payload = self._held.pop(number)
        self._nbytes -= len(payload)
        numbers = self._numbers[identity]
        numbers.remove(number)  # nearly always the first
        if not numbers:
            del self._numbers[identity]
