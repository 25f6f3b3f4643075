"""The transfer's counts on SGLang's /metrics page (--enable-metrics), through prometheus_client, as SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

PREFIX = "sglang_hetero"
COUNTS = {
    "requests": "requests that arrived completely",
    "failures": "requests that failed on this path",
    "bytes": "bytes written to decode ranks",
    "descriptors": "contiguous runs of bytes written to decode ranks",
    "writes": "batches written to decode ranks",
    "reads": "sources read from, in state mode pull",
    "pieces": "pieces merged into caches",
    "verified": "pieces compared with the source's digests (SGLANG_HETERO_VERIFY=1)",
    "differences": "pieces that differed from the source's digests",
    "dropped": "messages of peers that were not right",
}
"""Names of counters.Counters and what they count."""


@cache
def _counters() -> dict[str, Any]:
    from prometheus_client import Counter

    return {
        name: Counter(f"{PREFIX}:{name}", f"sglang-hetero: {what}", labelnames=["side"])
        for name, what in COUNTS.items()
    }


def observer(side: str) -> Callable[[str, int], None]:
    """What a rank's Counters tell of every count. side: `prefill` or `decode`, a label of the metrics."""
    counters = {name: counter.labels(side=side) for name, counter in _counters().items()}

    def observe(name: str, by: int) -> None:
        counters[name].inc(by)

    return observe
