"""Metrics of the router, in addition to those of its HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.api.metrics import PREFIX
from serving.split.router.relay import Relay

_HELP = {
    "requests": "Forwarded requests.",
    "split": "Requests whose prompt a prefill worker computed.",
    "shared": "Requests whose worker was offered another worker's state.",
    "alone": "Requests that a decode worker computed alone.",
    "prefill_retries": "Retries on another prefill worker.",
    "decode_retries": "Retries on another decode worker.",
    "late": "Requests that exceeded their deadline.",
}


class RelayCollector:
    """A collector for a Prometheus registry."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; the registry calls this."""
        for name, value in asdict(self._relay.stats).items():
            yield CounterMetricFamily(f"{PREFIX}router_{name}", _HELP[name], value)
        yield from self._placed()
        labels = ["role", "url"]
        up = GaugeMetricFamily(f"{PREFIX}worker_up", "Whether a worker answers.", labels=labels)
        load = GaugeMetricFamily(f"{PREFIX}worker_load", "Running requests of a worker.", labels=labels)
        failures = CounterMetricFamily(f"{PREFIX}worker_failures", "Times that a worker did not answer.", labels=labels)
        for worker in (*self._relay.fleet.prefill, *self._relay.fleet.decode):
            where = [worker.role, worker.url]
            up.add_metric(where, float(worker.up))
            load.add_metric(where, worker.load)
            failures.add_metric(where, worker.failures)
        yield from (up, load, failures)

    def _placed(self) -> Iterator[Metric]:
        placement = self._relay.placement
        stats, following = placement.stats, placement.following
        by = CounterMetricFamily(f"{PREFIX}router_placed", "Choices of a worker by criterion.", labels=["by"])
        by.add_metric(["state"], stats.by_state)
        by.add_metric(["load"], stats.by_load)
        by.add_metric(["text"], stats.by_text)
        yield by
        text = "Choices by text because no worker tokenised the prompt in time."
        yield CounterMetricFamily(f"{PREFIX}router_untold", text, stats.untold)
        text = "Prompt tokens that the chosen workers had, by the fastest tier that had them."
        resumable = CounterMetricFamily(f"{PREFIX}router_resumable_tokens", text, labels=["role", "tier"])
        for where, count in stats.resumable.items():
            resumable.add_metric(list(where), count)
        yield resumable
        text = "Resumable tokens that a worker chosen by text would have computed."
        yield CounterMetricFamily(f"{PREFIX}router_saved_tokens", text, stats.saved)
        if following is None:
            return
        text = "States that a worker reports; no value for a worker without an event stream."
        states = GaugeMetricFamily(f"{PREFIX}worker_states", text, labels=["role", "url"])
        for worker in (*self._relay.fleet.prefill, *self._relay.fleet.decode):
            if following.has_stream(worker):
                states.add_metric([worker.role, worker.url], following.states_of(worker))
        yield states
