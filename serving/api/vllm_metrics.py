"""The server's metrics under vLLM's names, for dashboards made for vLLM.

Every name has the labels `model_name` and `engine`, as in vLLM. Metrics that vLLM defines differently, or not at all,
have no alias.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

PREFIX = "vllm:"
ALIASES = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries", "gpu_prefix_cache_queries"),
    "cached_prompt_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "generation_tokens": ("generation_tokens",),
    "requests_finished": ("request_success",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "draft_tokens_accepted": ("spec_decode_num_accepted_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "time_per_output_token_seconds": ("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "pages": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "cache_config_info": ("cache_config_info",),
    "lora_requests_info": ("lora_requests_info",),
}
"""Names of each metric in vLLM's current and earlier releases. The value of `pages` is the fraction in use of pages or
of slots, whichever is larger: without either, no request can be added."""
_LABELS = {"reason": "finished_reason"}
_POOLS = ("pages", "slots")
_SUMMED = ("position",)
"""Labels that vLLM's metrics do not have. The collector sums samples over them."""


class VllmNames:
    """A collector of the aliases.

    Args:
        source: the registry with the server's own metrics.
        prefix: prefix of their names.
        model: the value of the label `model_name`.
    """

    def __init__(self, source: CollectorRegistry, prefix: str, model: str) -> None:
        self._source, self._prefix, self._model = source, prefix, model

    def collect(self) -> Iterator[Metric]:
        """Yields the aliases; the registry calls this."""
        metrics = {metric.name.removeprefix(self._prefix): metric for metric in self._source.collect()}
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
        renamed = Metric(PREFIX + alias, metric.documentation, metric.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        whole: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            labels = {"model_name": self._model, "engine": "0"}
            labels |= {_LABELS.get(k, k): v for k, v in sample.labels.items() if k not in _SUMMED}
            state = labels.pop("state", "used")
            name = PREFIX + alias + sample.name.removeprefix(metric.name)
            key = name, tuple(labels.items())
            whole[key] = whole.get(key, 0.0) + sample.value
            if state == "used":
                values[key] = values.get(key, 0.0) + sample.value
        for key, value in values.items():
            renamed.add_sample(key[0], dict(key[1]), value / (whole[key] or 1.0) if share else value)
        return renamed
