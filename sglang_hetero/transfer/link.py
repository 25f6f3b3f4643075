"""What both sides of a transfer need of the process around them: a way to post messages, and the peer's address."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """Where a rank receives control messages."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Addressee:
    """A prefill rank that is told something: where it takes messages, and which process is meant."""

    endpoint: Endpoint
    incarnation: str = ""
    """Empty if that is not known: whoever is there."""


@dataclass(frozen=True)
class Awaited:
    """A peer's process that requests have to do with. units: of staging, kept because it may still write to them."""

    label: str
    address: str
    """Of the peer's server, as the log calls it."""
    session: str
    """Of its transfer engine."""
    endpoint: Endpoint
    """Where it takes messages."""
    units: int = 0
    heard: float = float("-inf")
    """When it last said anything to this rank, time.monotonic()."""


Post = Callable[[Endpoint, bytes], None]
"""Send one encoded message to a rank, from any thread, without waiting. Raises PeerAway if it cannot be sent, and then
it will never arrive; what was sent may still get lost."""
