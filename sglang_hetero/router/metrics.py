"""What a router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .health import State

if TYPE_CHECKING:
    from .fleet import Fleet

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Bounds of the histograms: from a short prompt on a fast device to a long one that waits."""
CLIENT_LEFT = "499"
"""`status` of requests whose client went away; proxies use this number for it."""


class Metrics:
    """The counters of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sglang_hetero:router_requests",
            "Requests that have ended, by route and HTTP status. 499: the client went away. One that broke off after "
            "its first token counts as 200, and in router_streams_broken",
            ("route", "status"),
            registry=self.registry,
        )
        self.retries = Counter(
            "sglang_hetero:router_retries", "Attempts beyond the first one of a request", registry=self.registry
        )
        self.broken = Counter(
            "sglang_hetero:router_streams_broken",
            "Streams that failed after their first token had been passed on",
            ("route",),
            registry=self.registry,
        )
        self.first_token = Histogram(
            "sglang_hetero:router_time_to_first_token_seconds",
            "From a request's arrival to the first piece of a streamed answer",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "sglang_hetero:router_request_seconds",
            "From a request's arrival to the end of its answer, of requests that were answered with 200",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )

    def watch(self, fleet: Fleet) -> None:
        """Show the servers of a fleet, too: those that are members when the figures are read."""
        self.registry.register(_Servers(fleet))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


class _Servers:
    """Figures of servers, read from where they are kept: those of a server that has gone do not stay."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        labels = ("role", "server")
        failures = CounterMetricFamily(
            "sglang_hetero:router_failures",
            "Requests that failed at a server: lost (the connection), refused (it said so), ended (a stream broke off)",
            labels=(*labels, "kind"),
        )
        tokens = GaugeMetricFamily(
            "sglang_hetero:router_outstanding_tokens",
            "Tokens given to a server and not finished, estimated",
            labels=labels,
        )
        requests = GaugeMetricFamily(
            "sglang_hetero:router_outstanding_requests", "Requests given to a server and not finished", labels=labels
        )
        states = GaugeMetricFamily(
            "sglang_hetero:router_servers", "Servers by role and state", labels=("role", "state")
        )
        counts: dict[tuple[str, str], int] = {}
        for server in self._fleet.servers:
            who = (str(server.instance.role), server.instance.url)
            tokens.add_metric(who, server.load.tokens)
            requests.add_metric(who, server.load.requests)
            for kind, count in server.failures.items():
                failures.add_metric((*who, kind), count)
            for state in State:
                key = (who[0], str(state))
                counts[key] = counts.get(key, 0) + (server.health.state is state)
        for key, count in counts.items():
            states.add_metric(key, count)
        return [failures, tokens, requests, states]
