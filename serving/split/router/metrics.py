"""The router's own metrics, in addition to those of its HTTP server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.api.metrics import PREFIX
from serving.split.router.relay import Relay

_COUNTED = {
    "requests": "Requests that were passed on.",
    "split": "Of those, with a prompt that a prefill worker had computed.",
    "shared": "Requests whose worker was told of a state that another one held.",
    "alone": "Of those, computed by a decode worker alone.",
    "prefill_retries": "Times that another prefill worker had to be asked.",
    "decode_retries": "Times that another decode worker had to be asked.",
    "late": "Requests that ended by their deadline.",
}


class RelayCollector:
    """For a Prometheus registry."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for name, value in asdict(self._relay.stats).items():
            yield CounterMetricFamily(f"{PREFIX}router_{name}", _COUNTED[name], value)
        yield from self._placed()
        labels = ["role", "url"]
        up = GaugeMetricFamily(f"{PREFIX}worker_up", "Whether a worker answers.", labels=labels)
        load = GaugeMetricFamily(f"{PREFIX}worker_load", "Requests under way at a worker.", labels=labels)
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
        by = CounterMetricFamily(f"{PREFIX}router_placed", "Choices of a worker, by what decided.", labels=["by"])
        by.add_metric(["state"], stats.by_state)
        by.add_metric(["load"], stats.by_load)
        by.add_metric(["text"], stats.by_text)
        yield by
        text = "Choices by text because no worker said in time what the prompt's tokens are."
        yield CounterMetricFamily(f"{PREFIX}router_untold", text, stats.untold)
        text = "Prompt tokens that the chosen workers could go on from, by the fastest tier that had them."
        found = CounterMetricFamily(f"{PREFIX}router_resumable_tokens", text, labels=["role", "tier"])
        for where, count in stats.resumable.items():
            found.add_metric(list(where), count)
        yield found
        text = "Of those, tokens that the worker chosen by text would have had to compute."
        yield CounterMetricFamily(f"{PREFIX}router_saved_tokens", text, stats.saved)
        if following is None:
            return
        text = "States that a worker's events tell of; none for one without a stream."
        states = GaugeMetricFamily(f"{PREFIX}worker_states", text, labels=["role", "url"])
        for worker in (*self._relay.fleet.prefill, *self._relay.fleet.decode):
            if following.has_stream(worker):
                states.add_metric([worker.role, worker.url], following.states_of(worker))
        yield states
