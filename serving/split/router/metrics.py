"""Metrics of the router, in addition to those of its HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import Metric

from serving.api.metrics import Families, Labels
from serving.split.router.placement import PlacementStats
from serving.split.router.relay import Relay, RelayStats


class RelayCollector:
    """A collector for a Prometheus registry."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; the registry calls this."""
        placement = self._relay.placement
        families, following = Families(), placement.following
        families.exported(RelayStats, asdict(self._relay.stats))
        families.exported(PlacementStats, asdict(placement.stats))
        for worker in (*self._relay.fleet.prefill, *self._relay.fleet.decode):
            labels: Labels = (("role", worker.role), ("url", worker.url))
            families.gauge("worker_up", "Whether a worker answers.", {labels: worker.up})
            families.gauge("worker_load", "Running requests of a worker.", {labels: worker.load})
            families.count("worker_failures", "Times that a worker did not answer.", {labels: worker.failures})
            if following is not None:
                text = "States that a worker reports; no value for a worker without an event stream."
                states = {labels: following.states_of(worker)} if following.has_stream(worker) else {}
                families.gauge("worker_states", text, states)
        yield from families.metrics()
