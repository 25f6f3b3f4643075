"""How a router is to work: each default stands here, and the flags of the command take it from here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .health import Limits


class Unknown(StrEnum):
    """What to do with a server whose layout is not known, because it has no `GET /hetero/instance` (stock SGLang) or
    takes SGLang's own path only (SGLANG_HETERO=off, or settings that ours does not serve)."""

    LIKE = "like"
    """Pair it with others of which nothing is known either: then SGLang itself decides, as it does without us."""
    ANY = "any"
    """Pair it with every server. SGLang refuses some wrong pairs and serves others wrong (docs/support.md)."""
    NEVER = "never"
    """It gets no requests."""


@dataclass(frozen=True)
class Settings:
    """seconds: for a request from its first byte to its end. retries: attempts beyond the first. pause: seconds before
    the first retry, half as long again before each further one. idle: most seconds between two pieces of a stream.
    grace: seconds that the other server has to say the true cause when one says that a request failed; if its process
    is gone, its connection says so at once."""

    seconds: float = 1800.0
    retries: int = 5
    pause: float = 0.05
    max_pause: float = 5.0
    idle: float = 300.0
    grace: float = 1.0


@dataclass(frozen=True)
class Options:
    """How a router is to work. key: shown to servers when they are asked for /hetero/instance, and asked for on
    /hetero/pairs. probe_seconds: for an answer to /health. max_payload: bytes of a request."""

    settings: Settings = field(default_factory=Settings)
    limits: Limits = field(default_factory=Limits)
    unknown: Unknown = Unknown.LIKE
    key: str | None = None
    health_path: str = "/health"
    probe_seconds: float = 25.0
    max_payload: int = 512 << 20
