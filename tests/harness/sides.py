"""What the test process and the rank processes tell each other. Plain data: no torch, no SGLang."""

from dataclasses import dataclass

from .geometry import Geometry

LOOPBACK = "127.0.0.1"
NO_BOOTSTRAP = 1
"""Port of a process that has no peer."""


@dataclass(frozen=True)
class Shard:
    """One rank of one side."""

    geometry: Geometry
    tp: int
    rank: int


@dataclass(frozen=True)
class Side:
    """What the ranks of one side share."""

    mode: str
    """`prefill` or `decode`."""
    backend: str
    """Value of --disaggregation-transfer-backend."""
    bootstrap_port: int
    shuffle_seed: int
    dp_size: int = 1
    """Attention-DP ranks of the side; each holds requests of its own."""
    dp_rank: int = 0
    http_port: int = 1
    """Of the side's HTTP server, by which its ranks are known; nothing listens there."""


@dataclass(frozen=True)
class Request:
    """A prompt of `tokens` tokens with the cache contents of `seed`."""

    room: int
    tokens: int
    seed: int
    bootstrap_port: int = NO_BOOTSTRAP
    """Of the prefill side that it goes to."""
