"""Work of several requests for one thread: a short one does not stand behind a long one.

Whoever has least to do goes first; every few turns it is who has waited longest, so that a long request goes on however
many short ones come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Item = TypeVar("Item")

PATIENCE = 4
"""Of so many turns one goes to who has waited longest: a short request beside a long one takes about a third longer
than alone, and the long one keeps a quarter beside it. Those who wait share these turns."""


class Lines(Generic[Owner, Item]):
    """Items by owner. Any thread may put; one takes."""

    def __init__(self, size: Callable[[Owner, int], int] = lambda owner, waiting: waiting) -> None:
        """size: how much an owner has to do, from it and its number of items; by default that number."""
        self._size = size
        self._lines: dict[int, tuple[Owner, deque[Item]]] = {}  # by identity, those that have waited longest first
        self._changed = threading.Condition()
        self._taken: Owner | None = None
        """Whose items were taken last: they are worked on until more are taken."""
        self._stopped = False
        self._turn = 0

    def put(self, owner: Owner, item: Item) -> None:
        """Add an item behind the others of its owner."""
        with self._changed:
            _, line = self._lines.setdefault(id(owner), (owner, deque()))
            line.append(item)
            self._changed.notify()

    def has(self, owner: Owner) -> bool:
        """Whether an owner has items waiting, or had its turn last and whoever took them has not come for more."""
        with self._changed:
            return id(owner) in self._lines or self._taken is owner

    def take(self, limit: int) -> tuple[Owner, list[Item]] | None:
        """The next owner and its first items, at most `limit`; waits for some. None: stopped, and nothing is left."""
        with self._changed:
            self._taken = None
            while not self._lines:
                if self._stopped:
                    return None
                self._changed.wait()
            self._turn += 1
            entries = self._lines.values()
            if self._turn % PATIENCE == 0:
                owner, line = next(iter(entries))
            else:
                owner, line = min(entries, key=lambda entry: self._size(entry[0], len(entry[1])))
            del self._lines[id(owner)]
            items = [line.popleft() for _ in range(min(limit, len(line)))]
            if line:
                self._lines[id(owner)] = (owner, line)
            self._taken = owner
            return owner, items

    def stop(self) -> None:
        """No thread waits any more; what is there is still taken."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
