"""Requests that decode has given up, and whose prefill ranks wait for it, while nobody knows where those ranks are.

They are told as soon as it is known. Books only: no threads, no sockets.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_OWED = 4096
"""Requests; the oldest are forgotten first. Who may send requests names the address of their prefill server in them."""
AGAIN_SECONDS = 5.0
"""Between two questions to a server only because something is owed to it, as between SGLang's heartbeats."""


class Owed:
    """By the address of a prefill server's bootstrap server. For one thread at a time."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """seconds: how long prefill waits for a request; then it has given it up by itself."""
        self._seconds, self._clock = seconds, clock
        self._rooms: OrderedDict[tuple[str, int], tuple[float, str]] = OrderedDict()  # until when, and why
        self._asked: dict[str, float] = {}

    def add(self, address: str, room: int, reason: str) -> None:
        """A server has to be told why a request will not be asked for."""
        self._rooms[address, room] = (self._clock() + self._seconds, reason)
        self._rooms.move_to_end((address, room))
        while len(self._rooms) > MAX_OWED:
            self._rooms.popitem(last=False)

    def drop(self, address: str, room: int) -> None:
        """The room is used again: what is owed to the former use would end this one."""
        self._rooms.pop((address, room), None)

    def of(self, address: str) -> dict[int, str]:
        """What a server has to be told, by room."""
        self._expire()
        return {room: reason for (each, room), (_, reason) in self._rooms.items() if each == address}

    def take(self, address: str) -> dict[int, str]:
        """The same; it is owed no more."""
        found = self.of(address)
        for room in found:
            del self._rooms[address, room]
        return found

    def due(self) -> str | None:
        """The server that has not been asked for longest, if one is due; it counts as asked then."""
        self._expire()
        now = self._clock()
        self._asked = asked = {address: self._asked.get(address, -math.inf) for address, _ in self._rooms}
        found = min(asked, key=lambda address: asked[address], default=None)
        if found is None or now - asked[found] < AGAIN_SECONDS:
            return None
        asked[found] = now
        return found

    def _expire(self) -> None:
        now = self._clock()
        while self._rooms and next(iter(self._rooms.values()))[0] <= now:  # all wait equally long, in order
            self._rooms.popitem(last=False)
