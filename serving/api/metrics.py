"""Metrics for Prometheus: times are observed as requests run; all other values are read from the engine at each scrape.

Each server has its own registry. docs/operations.md explains every metric.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.api.vllm_metrics import VllmNames
from serving.engine.requests.output import RequestOutput

PREFIX = "mamba_jax_"

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_RECENT = 1024
"""Number of recent times that the status page summarises."""

_Tiers = Mapping[str, Mapping[str, float]]
Observer = Callable[[RequestOutput, float], None]


class Metrics:
    """One server's metrics.

    Args:
        model: label of the engine's metrics.
        vllm_names: also export the metrics under vLLM's names.
    """

    def __init__(self, model: str, *, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        histogram = _maker(Histogram, self.registry)
        self._recent = {name: deque[float](maxlen=_RECENT) for name in ("first_token", "between_tokens", "whole")}
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self._between = histogram(
            "inter_token_latency_seconds", "Between two tokens of a stream, as the server sends them.", _BETWEEN
        )
        self._per_token = histogram(
            "time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _BETWEEN
        )
        self._queue = histogram("queue_time_seconds", "From arrival to the first step.", _FIRST_TOKEN)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._answers = Counter(
            PREFIX + "http_requests", "HTTP requests answered; 499: the client left.", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._in_flight = Gauge(
            PREFIX + "http_requests_in_flight", "HTTP requests being answered.", registry=self.registry
        )
        self._engine = _EngineCollector(model)
        self.registry.register(self._engine)
        self._aliases: CollectorRegistry | None = None
        if vllm_names:
            self._aliases = CollectorRegistry(auto_describe=False)
            self._aliases.register(VllmNames(self.registry, PREFIX, model))

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request while it runs."""
        with self._in_flight.track_inprogress():
            yield

    def answered(self, path: str, status: int) -> None:
        """Counts an answer."""
        self._answers.labels(path, str(status)).inc()

    def request(self, prompt_tokens: int) -> Observer:
        """Returns an observer of a request that starts now. Call it with each delta and its time."""
        begin = last = time.monotonic()
        tokens = collections.Counter[int]()
        """Tokens of each choice so far."""

        def observe(output: RequestOutput, now: float) -> None:
            nonlocal last
            metrics, first_output = output.metrics, not tokens.total()
            new = {choice.index: len(choice.token_ids) for choice in output.outputs if choice.token_ids}
            tokens.update(new)
            if new and first_output:
                first = metrics.first_token_time if metrics is not None else None
                waited = max(0.0, (now if first is None else first) - begin)
                self._first.observe(waited)
                self._recent["first_token"].append(waited)
                if metrics is not None and metrics.first_scheduled_time is not None:
                    self._queue.observe(max(0.0, metrics.first_scheduled_time - metrics.arrival_time))
            elif new:
                # Tokens that arrive together share the time since the previous ones.
                each = (now - last) / sum(new.values()) * len(new)
                for _ in range(sum(new.values())):
                    self._between.observe(each)
                self._recent["between_tokens"].append(each)
            last = now
            if output.finished:
                self._whole.observe(now - begin)
                self._recent["whole"].append(now - begin)
                self._prompt.observe(prompt_tokens)
                self._generated.observe(tokens.total())
                longest = max(tokens.values(), default=0)
                if metrics is not None and metrics.first_token_time is not None and longest > 1:
                    end = metrics.finished_time or now
                    self._per_token.observe(max(0.0, end - metrics.first_token_time) / (longest - 1))

        return observe

    def latency(self) -> dict[str, dict[str, float]]:
        """Returns the median and the 99th percentile, in seconds, of the latest times to the first token, between
        tokens, and of whole requests. Omits a kind of time that has no values yet."""
        latest = ((name, sorted(times)) for name, times in self._recent.items() if times)
        return {name: {"p50": each[len(each) // 2], "p99": each[len(each) * 99 // 100]} for name, each in latest}

    def exposition(self, stats: Mapping[str, Any]) -> tuple[bytes, str]:
        """Returns all metrics in Prometheus's text form, with its content type; `stats` are `Engine.stats()`."""
        self._engine.stats = stats
        text = generate_latest(self.registry)
        if self._aliases is not None:
            text += generate_latest(self._aliases)
        return text, CONTENT_TYPE_LATEST


def _maker(kind: type[Histogram], registry: CollectorRegistry) -> Callable[..., Histogram]:
    return lambda name, text, buckets: kind(PREFIX + name, text, buckets=buckets, registry=registry)


class _EngineCollector:
    """The engine's counters as metrics. With several replicas, each has its own under the label `engine`."""

    def __init__(self, model: str) -> None:
        self.stats: Mapping[str, Any] = {}
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; the registry calls this."""
        yield _gauge("model_info", "The served model.", {(("model", self._model),): 1}).metric()
        if not self.stats:
            return
        yield from (family.metric() for family in _tiers(self.stats.get("tiers", {})))
        if "engines" not in self.stats:
            yield from (family.metric() for family in _families(self.stats))
            return
        whole: dict[str, _Family] = {}
        for number, stats in enumerate(self.stats["engines"]):
            for name, kind, text, values in _families(stats):
                family = whole.setdefault(name, _Family(name, kind, text, {}))
                family.values.update({(("engine", str(number)), *key): value for key, value in values.items()})
        yield from (family.metric() for family in whole.values())


def _families(stats: Mapping[str, Any]) -> Iterator[_Family]:
    """Yields the counters of one engine."""
    loop = stats["loop"]
    yield _gauge("requests_waiting", "Requests in the queue.", {(): stats["waiting"]})
    yield _gauge("requests_running", "Requests that have a batch row.", {(): stats["running"]})
    yield _counter("requests_refused", "Requests refused because the queue was full.", {(): stats["refused"]})
    yield _counter(
        "requests_finished", "Finished requests (each choice counts) by finish reason.",
        {(("reason", str(reason)),): count for reason, count in stats["finished"].items()},
    )  # fmt: skip
    yield _counter("preemptions", "Requests returned to the queue for lack of memory.", {(): stats["preemptions"]})
    for name, key, text in (
        ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
        ("cached_prompt_tokens", "cached_tokens", "Prompt tokens that the prefix cache saved."),
        ("generation_tokens", "output_tokens", "Output tokens."),
        ("prefill_tokens", "prefill_tokens", "Tokens computed by prefill."),
        ("full_prefix_hits", "full_hits", "Requests whose whole prompt was cached."),
        ("pages_evicted", "pages_evicted", "Cached pages evicted."),
        ("states_evicted", "states_evicted", "Cached states evicted."),
        ("states_published", "states_published", "States added to the prefix cache."),
        ("anchors", "anchors", "Under replay: states that decoding sequences wrote and continued from."),
    ):
        yield _counter(name, text, {(): stats[key]})
    yield _counter(
        "prefix_misses", "Requests without a cached prefix, by reason.",
        {(("reason", reason),): count for reason, count in stats["misses"].items()},
    )  # fmt: skip
    for pool in ("slots", "pages"):
        if pool in stats:
            sizes = {(("state", state),): stats[pool][state] for state in ("free", "used", "cached")}
            yield _gauge(pool, "State slots by use." if pool == "slots" else "Pages by use.", sizes)
    yield from _fetches(stats.get("tiers", {}))
    drafts = loop["drafts"]
    for name, key, text in (
        ("draft_tokens", "drafted_at", "Draft tokens that were verified, by position in the step."),
        ("draft_tokens_accepted", "accepted_at", "Draft tokens that were accepted, by position in the step."),
    ):
        yield _counter(name, text, {(("position", str(i + 1)),): n for i, n in enumerate(drafts[key])})
    yield _counter("steps", "Steps of the engine.", {(): loop["steps"]})
    yield _counter(
        "lockstep_steps", "Steps that waited for the previous step's result, because most rows need it on the host.",
        {(): loop["lockstep_steps"]},
    )  # fmt: skip
    yield _counter("step_failures", "Failed steps; the engine computed all state again.", {(): loop["failures"]})
    yield _counter(
        "outputs_not_finite", "Choices that ended because their logits were NaN or infinite.",
        {(): loop["not_finite"]},
    )  # fmt: skip
    yield _counter(
        "step_seconds", "Time of the engine's thread by activity: wait is for the device, all others are host work.",
        {(("part", part),): loop[f"{part}_seconds"] for part in ("plan", "dispatch", "wait", "settle")},
    )  # fmt: skip
    yield _counter("compilations", "Programs compiled; constant once the server is ready.", {(): stats["compilations"]})


def _tiers(tiers: _Tiers) -> Iterator[_Family]:
    """Yields the contents of the cache tiers below the devices, which all engines share; nothing without tiers."""
    if not tiers:
        return
    for name, key, text in (
        ("tier_checkpoints", "units", "Checkpoints in a tier below the device."),
        ("tier_bytes", "used_bytes", "Bytes in a tier."),
        ("tier_capacity_bytes", "capacity_bytes", "Capacity of a tier in bytes."),
    ):
        yield _gauge(name, text, _by_tier(tiers, key))
    for name, key, text in (
        ("tier_stored", "stored", "Checkpoints stored in a tier."),
        ("tier_evicted", "evicted", "Checkpoints evicted from a tier."),
        ("tier_lost", "lost", "Checkpoints that were damaged, or could not be written or read."),
        ("tier_not_kept", "not_kept", "Checkpoints rejected: too large, or too many transfers pending."),
        ("tier_stored_bytes", "stored_bytes", "Bytes stored in a tier."),
    ):
        yield _counter(name, text, _by_tier(tiers, key))


def _fetches(tiers: _Tiers) -> Iterator[_Family]:
    """Yields one engine's fetches from the tiers."""
    if not tiers:
        return
    for name, key, text in (
        ("tier_fetches", "hits", "Fetches started."),
        ("tier_fetches_arrived", "arrived", "Fetches that a request continued from."),
        ("tier_fetches_dearer", "dearer", "Fetches not started because computing was expected to be faster."),
        ("tier_fetched_tokens", "hit_tokens", "Tokens that the fetched states cover."),
        ("tier_fetched_bytes", "fetched_bytes", "Bytes fetched from a tier."),
    ):
        yield _counter(name, text, _by_tier(tiers, key))


def _by_tier(tiers: _Tiers, key: str) -> dict[Any, float]:
    return {(("tier", name),): tier[key] for name, tier in tiers.items()}


def _gauge(name: str, text: str, values: dict[Any, float]) -> _Family:
    return _Family(name, GaugeMetricFamily, text, values)


def _counter(name: str, text: str, values: dict[Any, float]) -> _Family:
    return _Family(name, CounterMetricFamily, text, values)


class _Family(NamedTuple):
    """A metric's name, type, help text, and values by tuples of (label, value) pairs."""

    name: str
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    text: str
    values: dict[Any, float]

    def metric(self) -> Metric:
        """Returns the metric as a `prometheus_client` object."""
        names = [label for label, _ in next(iter(self.values), ())]
        family = self.kind(PREFIX + self.name, self.text, labels=names)
        for labels, value in self.values.items():
            family.add_metric([value for _, value in labels], float(value))
        return family
