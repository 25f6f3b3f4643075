"""Which servers there are, as whoever sends them requests sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from sglang_hetero.layout.manifest import Side

from .record import Instance, clean_url


class Members(Protocol):
    """The servers that there are. Thread-safe."""

    @property
    def trouble(self) -> str:
        """Why `snapshot` may be old, in a line for people; empty while it is up to date."""
        ...

    def snapshot(self) -> tuple[Instance, ...]:
        """All of them, sorted by role and URL, each once."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have it called after each change, from any thread; it takes a snapshot then. It must return soon. What it
        raises is logged."""
        ...

    def close(self) -> None:
        """No callback is called any more once this has returned."""
        ...


class StaticMembers:
    """Servers that are given by URL and stay. What else is to be known of them they say on `GET /hetero/instance`."""

    trouble = ""

    def __init__(self, prefills: Iterable[tuple[str, int | None]], decodes: Iterable[str]) -> None:
        """prefills: URL and bootstrap port, None if it is not given. Raises RecordError for what is no URL or port."""
        found = [Instance(role=Side.PREFILL, url=clean_url(url), bootstrap_port=port or 0) for url, port in prefills]
        found += [Instance(role=Side.DECODE, url=clean_url(url)) for url in decodes]
        self._all = in_order(found)

    def snapshot(self) -> tuple[Instance, ...]:
        """All of them."""
        return self._all

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Nothing ever changes."""

    def close(self) -> None:
        """There is nothing to be ended."""


def in_order(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Sorted by role and URL; of several with the same role and URL the last one that is given."""
    by_url = {(one.role, one.url): one for one in instances}
    return tuple(by_url[key] for key in sorted(by_url))
