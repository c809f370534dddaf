"""Metrics for Prometheus: times are observed as requests run; all other values are read from the engine at each scrape.

Each server has its own registry. docs/operations.md explains every metric.
"""

from __future__ import annotations

import collections
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.core.stats import Exported, Stats
from serving.core.tiers.tier import TierStats
from serving.core.tiers.tiers import FetchStats
from serving.engine.requests.output import RequestOutput
from serving.engine.stats import DraftStats, LoopStats

PREFIX = "mamba_jax_"
VLLM_PREFIX = "vllm:"

_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_RECENT = 1024
"""Number of recent times that the status page summarizes."""

ALIASES = tomllib.loads(Path(__file__).with_name("vllm_metrics.toml").read_text(encoding="utf-8"))
"""Names of each metric in vLLM."""
_LABELS = {"reason": "finished_reason"}
_POOLS = ("pages", "slots")

Labels = tuple[tuple[str, str], ...]
"""Pairs of a label and its value."""
Observer = Callable[[RequestOutput, float], None]


class Metrics:
    """One server's metrics, with the label `model`; `vllm_names` also exports them under vLLM's names."""

    def __init__(self, model: str, *, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

        self._recent = {name: deque[float](maxlen=_RECENT) for name in ("first_token", "between_tokens", "whole")}
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        text = "Between two tokens of a stream, as the server sends them."
        self._between = histogram("inter_token_latency_seconds", text, _BETWEEN)
        text = "Mean time of a request's tokens after the first."
        self._per_token = histogram("time_per_output_token_seconds", text, _BETWEEN)
        self._queue = histogram("queue_time_seconds", "From arrival to the first step.", _FIRST_TOKEN)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        text = "HTTP requests answered; 499: the client left."
        self.answers = Counter(PREFIX + "http_requests", text, ["path", "status"], registry=self.registry)
        text = "HTTP requests being answered."
        self.in_flight = Gauge(PREFIX + "http_requests_in_flight", text, registry=self.registry)
        self._model, self._stats = model, dict[str, Any]()
        self.registry.register(self)
        self._aliases: CollectorRegistry | None = None
        if vllm_names:
            self._aliases = CollectorRegistry(auto_describe=False)
            self._aliases.register(_VllmNames(self.registry, model))

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
        self._stats = dict(stats)
        text = generate_latest(self.registry)
        if self._aliases is not None:
            text += generate_latest(self._aliases)
        return text, CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's counters; the registry calls this. With several replicas, each has its own under the
        label `engine`."""
        families = Families()
        families.gauge("model_info", "The served model.", {(("model", self._model),): 1})
        if self._stats:
            add_tiers(families, self._stats.get("tiers", {}))  # all engines share their contents
            for number, stats in enumerate(self._stats.get("engines", [self._stats])):
                _add_engine(families, stats, (("engine", str(number)),) if "engines" in self._stats else ())
        yield from families.metrics()


class Families:
    """Families of metrics, to which statistics are added."""

    def __init__(self) -> None:
        self._values: dict[tuple[Any, str, str], dict[Labels, float]] = {}
        """By class of `prometheus_client`, name and text."""

    def gauge(self, name: str, text: str, values: Mapping[Labels, float], kind: Any = GaugeMetricFamily) -> None:
        """Adds a gauge's values by labels."""
        self._values.setdefault((kind, name, text), {}).update(values)

    def count(self, name: str, text: str, values: Mapping[Labels, float]) -> None:
        """Adds a counter's values by labels."""
        self.gauge(name, text, values, CounterMetricFamily)

    def exported(self, kind: type, stats: Mapping[str, Any], labels: Labels = ()) -> None:
        """Adds the counters that the fields of a class declare, with further `labels`. `stats` has their values."""
        for each in fields(kind):
            if (counter := each.metadata.get(Exported)) is not None:
                found = stats[each.name]
                if isinstance(found, list):
                    found = dict(enumerate(found, 1))
                if not isinstance(found, Mapping):
                    found = {counter.value if counter.labels else (): found}
                names = ((key if isinstance(key, tuple) else (key,), value) for key, value in found.items())
                values = {(*labels, *zip(counter.labels, map(str, key), strict=True)): value for key, value in names}
                self.count(counter.name, counter.text, values)

    def metrics(self) -> Iterator[Metric]:
        """Yields the families as `prometheus_client` objects."""
        for (kind, name, text), values in self._values.items():
            family = kind(PREFIX + name, text, labels=[label for label, _ in next(iter(values), ())])
            for labels, value in values.items():
                family.add_metric([text for _, text in labels], float(value))
            yield family


def _add_engine(families: Families, stats: Mapping[str, Any], labels: Labels) -> None:
    now = time.time()
    families.gauge("requests_waiting", "Requests in the queue.", {labels: stats["waiting"]})
    families.gauge("requests_running", "Requests that have a batch row.", {labels: stats["running"]})
    for pool, text in (("slots", "State slots by use."), ("pages", "Pages by use.")):
        if pool in stats:
            sizes = {(*labels, ("state", state)): stats[pool][state] for state in ("free", "used", "cached")}
            families.gauge(pool, text, sizes)
    if "pages" in stats:
        config = (("block_size", str(stats["page_size"])), ("num_gpu_blocks", str(stats["pages"]["total"])))
        families.gauge("cache_config_info", "Tokens per page, and number of pages.", {(*labels, *config): 1})
    if stats.get("adapters"):
        used = stats["adapters"]
        names = [("max_lora", str(used["max"])), ("running_lora_adapters", used["running"])]
        names.append(("waiting_lora_adapters", ""))
        families.gauge("lora_requests_info", "Adapters of requests; the value is the time.", {(*labels, *names): now})
    families.exported(Stats, stats, labels)
    families.exported(LoopStats, stats["loop"], labels)
    families.exported(DraftStats, stats["loop"]["drafts"], labels)
    add_fetches(families, stats.get("tiers", {}), labels)
    text = "Programs compiled; constant once the server is ready."
    families.count("compilations", text, {labels: stats["compilations"]})
    text = "Kernels that failed the check at start, and are not used."
    families.gauge("kernel_fallbacks", text, {labels: stats["kernel_fallbacks"]})


def add_tiers(families: Families, tiers: Mapping[str, Any]) -> None:
    """Adds what each tier holds, from the snapshots of the tiers by name."""
    for name, tier in tiers.items():
        labels = (("tier", name),)
        families.gauge("tier_checkpoints", "Checkpoints in a tier below the device.", {labels: tier["units"]})
        families.gauge("tier_bytes", "Bytes in a tier.", {labels: tier["used_bytes"]})
        families.gauge("tier_capacity_bytes", "Capacity of a tier in bytes.", {labels: tier["capacity_bytes"]})
        families.exported(TierStats, tier, labels)


def add_fetches(families: Families, tiers: Mapping[str, Any], labels: Labels = ()) -> None:
    """Adds what an engine fetches from each tier."""
    for name, tier in tiers.items():
        families.exported(FetchStats, tier, (*labels, ("tier", name)))


class _VllmNames:
    """The metrics of `source` under vLLM's names, with the labels `model_name` and `engine`, as in vLLM.

    Metrics that vLLM defines differently, or not at all, have no alias.
    """

    def __init__(self, source: CollectorRegistry, model: str) -> None:
        self._source, self._model = source, model

    def collect(self) -> Iterator[Metric]:
        """Yields the aliases; the registry calls this."""
        metrics = {metric.name.removeprefix(PREFIX): metric for metric in self._source.collect()}
        for name, aliases in ALIASES.items():
            for alias in aliases:
                if name == "pages":
                    pools = [self._renamed(metrics[pool], alias, share=True) for pool in _POOLS if pool in metrics]
                    fullest = sorted((sample for pool in pools for sample in pool.samples), key=lambda each: each.value)
                    for pool in pools[:1]:
                        pool.samples = list({tuple(each.labels.items()): each for each in fullest}.values())
                        yield pool
                elif name in metrics:
                    yield self._renamed(metrics[name], alias, share=False)

    def _renamed(self, metric: Metric, alias: str, *, share: bool) -> Metric:
        renamed = Metric(VLLM_PREFIX + alias, metric.documentation, metric.type)
        values, whole = (collections.defaultdict[tuple[str, Labels], float](float) for _ in range(2))
        for sample in metric.samples:
            labels = {"model_name": self._model, "engine": "0"}
            # vLLM's metrics do not have the label `position`: samples are summed over it.
            labels |= {_LABELS.get(k, k): v for k, v in sample.labels.items() if k != "position"}
            state = labels.pop("state", "used")
            name = VLLM_PREFIX + alias + sample.name.removeprefix(metric.name)
            key = name, tuple(labels.items())
            whole[key] += sample.value
            if state == "used":
                values[key] += sample.value
        for key, value in values.items():
            renamed.add_sample(key[0], dict(key[1]), value / (whole[key] or 1.0) if share else value)
        return renamed
