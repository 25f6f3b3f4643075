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
    host: str = LOOPBACK
    """Address of its processes."""


@dataclass(frozen=True)
class Request:
    """A prompt of `tokens` tokens with the cache contents of `seed`."""

    room: int
    tokens: int
    seed: int
    bootstrap_port: int = NO_BOOTSTRAP
    """Of the prefill side that it goes to."""
    bootstrap_host: str = LOOPBACK
    drafted: bool | None = None
    """Whether that side has a draft; None: like decode."""


@dataclass(frozen=True)
class Forward:
    """How the forward passes of prefill are replayed (replay.py)."""

    layer_seconds: float = 0.0
    """Time of each layer, the draft's included."""
    overlap: bool = False
    """The order of SGLang's overlap schedule: a batch is handed over when the next one has been run."""
    hidden: frozenset[int] = frozenset()
    """Layers that store without a function of SGLang, as in the replay of a graph."""
    moves: bool = False
    """A prefix cache takes each chunk over, and has its pages already: the request is in other ones then."""
    parts: int = 1
    """Calls of `set_kv_buffer` with which an attention layer stores its tokens, as where a batch runs in halves."""


@dataclass(frozen=True)
class Turn:
    """What one round of a prefill rank's loop has done."""

    handed_over: tuple[int, ...]
    """Rooms whose last chunk has been handed over."""
    early_bytes: int
    """Bytes that have left the rank while the layers of this round ran, its own chunks' and earlier ones'."""
    sent_bytes: int
    """All that had left the rank since it was made when the layers had run."""
    ended: float
    """When the layers had run, by time.monotonic."""
    seconds: float
    """That SGLang's run_batch took, without the timer's waits."""
    cpu_seconds: float
    """Of those, the scheduler thread's own computing."""
