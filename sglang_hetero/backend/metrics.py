"""The transfer's counts on SGLang's /metrics page (--enable-metrics), through prometheus_client, as SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from sglang_hetero.perf.records import Component, Figures, Observe
from sglang_hetero.state.report import Report

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
    "hidden": "forward passes, and layers, that were not followed: their caches go at the end of the chunk at last",
    "again": "batches written again, because SGLang had moved the request meanwhile",
    "repeated": "messages said again, because nothing new had been heard of a request for a while",
    "dropped": "messages of peers that were not right",
    "unsealed": "messages that were not sealed with this side's token, or had come before (docs/security.md)",
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


GAUGES = {
    "units": "units of staging that a decode rank has",
    "units_free": "units of staging that nobody has",
    "units_quarantined": "units of staging that a source may still write into, of requests that have failed",
    "faults": "what is wrong with a rank, as /hetero/state says (docs/state.md)",
}
"""Names, and what is told of each rank about once a second."""


@cache
def _gauges() -> dict[str, Any]:
    from prometheus_client import Gauge

    return {
        name: Gauge(
            f"{PREFIX}:{name}",
            f"sglang-hetero: {what}",
            labelnames=["side", "rank"],
            multiprocess_mode="mostrecent",  # one process tells each rank; the default would add its pid
        )
        for name, what in GAUGES.items()
    }


def tell_report(report: Report) -> None:
    """Set the gauges of a rank to what it has just reported."""
    told = {**report.ours, "faults": len(report.faults)}
    for name, gauge in _gauges().items():
        if name in told:
            gauge.labels(side=report.side, rank=report.rank).set(told[name])


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 150.0)
"""Bounds of the buckets of times: from a merge of one piece to the longest wait for staging, 2.5 times a step or so."""
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Bounds of the buckets of shares."""
EARLY = "early_bytes_ratio"
HISTOGRAMS = {
    "allocation_wait_seconds": "from the start of a request at decode until it has pages, slot and row",
    "window_wait_seconds": "from then until it has units of staging",
    "transfer_seconds": "from the first byte of a request that a prefill rank writes to the last one",
    "merge_seconds": "of merging a request's pieces into a decode rank's caches, all together",
    "first_generation_to_enqueue_seconds": "from prefill's first token at decode until the request is in its queue",
    "enqueue_to_first_response_seconds": "from then until decode's first own step of the request has been processed",
    EARLY: "share of a request's bytes that a prefill rank had written when its prefill ended, 0 to 1",
}
"""Names, and what is observed once per request and rank (docs/perf.md)."""
BY_COMPONENT = {
    "component_bytes": "bytes written to decode ranks, by component",
    "component_descriptors": "contiguous runs of bytes written to decode ranks, by component",
}
"""Counters with the label `component`; /metrics shows their names with `_total`."""


@cache
def _histograms() -> dict[str, Any]:
    from prometheus_client import Histogram

    return {
        name: Histogram(
            f"{PREFIX}:{name}",
            f"sglang-hetero: {what}",
            labelnames=["side"],
            buckets=SHARES if name == EARLY else SECONDS,
        )
        for name, what in HISTOGRAMS.items()
    }


@cache
def _by_component() -> dict[str, Any]:
    from prometheus_client import Counter

    return {
        name: Counter(f"{PREFIX}:{name}", f"sglang-hetero: {what}", labelnames=["side", "component"])
        for name, what in BY_COMPONENT.items()
    }


def figures_observer(side: str) -> Observe:
    """What a rank's Perf tells of every record that ends. side: `prefill` or `decode`, a label of the metrics."""
    histograms = {name: histogram.labels(side=side) for name, histogram in _histograms().items()}
    counters = {
        (name, component): counter.labels(side=side, component=component.value)
        for name, counter in _by_component().items()
        for component in Component
    }

    def observe(figures: Figures) -> None:
        for name, seconds in figures.seconds.items():
            histograms[name].observe(seconds)
        if figures.early is not None:
            histograms[EARLY].observe(figures.early)
        for component in Component:
            counters["component_bytes", component].inc(figures.nbytes.get(component, 0))
            counters["component_descriptors", component].inc(figures.descriptors.get(component, 0))

    return observe
