"""The Grafana dashboard, the operations guide and the page of tiers name metrics and flags that exist."""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from serving.api.http.settings import ServerSettings
from serving.api.metrics import ALIASES, PREFIX, Families, Metrics, add_fetches, add_tiers
from serving.core.scheduler import Scheduler
from serving.core.tiers.tier import Sizes, Tier
from serving.core.tiers.tiers import Tiers
from serving.engine.requests.output import CompletionOutput, RequestOutput
from serving.engine.stats import LoopStats
from tests.serving.core.drive import small_config

ROOT = Path(__file__).resolve().parents[3]


def names(server) -> set[str]:
    """Every metric of a live server after a request, as Prometheus would store it."""
    server.complete(max_tokens=2)
    return set(re.findall(r"^(?:# TYPE )?(\w+)", server.http.get("/metrics").text, re.M))


def test_metrics_have_the_names_of_vllm_on_request():
    counted = Scheduler(small_config(num_pages=9)).stats() | {
        "loop": asdict(LoopStats()), "compilations": 0, "kernel_fallbacks": 0, "running": 3, "prompt_tokens": 10,
        "cached_tokens": 4, "finished": {"stop": 2}, "pages": {"total": 8, "free": 4, "used": 2, "cached": 2},
        "page_size": 16, "adapters": {"max": 4, "running": "a,b"},
    }  # fmt: skip
    metrics = Metrics("tiny", vllm_names=True)
    observe = metrics.request(5)
    choice = CompletionOutput(0, "a", [1, 2], finish_reason="stop")
    observe(RequestOutput("r", None, [1], [choice], finished=True), time.monotonic())
    families = list(text_string_to_metric_families(metrics.exposition(counted)[0].decode()))
    samples = [sample for family in families for sample in family.samples]
    found = {(each.name, each.labels.get("finished_reason"), each.labels.get("le")): each for each in samples}
    for name, value in {
        "num_requests_running": 3, "prompt_tokens_total": 10, "prefix_cache_queries_total": 10,
        "prefix_cache_hits_total": 4, "kv_cache_usage_perc": 0.25, "e2e_request_latency_seconds_count": 1,
        "time_to_first_token_seconds_count": 1, "request_generation_tokens_sum": 2,
    }.items():  # fmt: skip
        sample = found["vllm:" + name, None, None]
        assert sample.value == value, name
        assert sample.labels == {"model_name": "tiny", "engine": "0"}
    info = found["vllm:cache_config_info", None, None].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "8")
    info = found["vllm:lora_requests_info", None, None].labels
    assert (info["max_lora"], info["running_lora_adapters"], info["waiting_lora_adapters"]) == ("4", "a,b", "")
    counted["slots"] = {"total": 4, "free": 1, "used": 3, "cached": 0}
    assert b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.75' in metrics.exposition(counted)[0]
    assert found["vllm:request_success_total", "stop", None].value == 2
    assert found["vllm:e2e_request_latency_seconds_bucket", None, "+Inf"].value == 1
    assert {PREFIX + name for name in ALIASES} <= {family.name for family in families}
    assert b"vllm:" not in Metrics("tiny").exposition(counted)[0]


def test_the_dashboard_asks_for_metrics_that_exist(server):
    board = json.loads((ROOT / "serving/api/grafana/dashboard.json").read_text())
    known, asked = names(server), set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = set(re.findall(r"mamba_jax_\w+", target["expr"]))
            assert found, panel["title"]
            asked |= found
    assert asked <= known, asked - known


def test_the_guide_names_every_metric_and_setting(server):
    text = (ROOT / "docs/operations.md").read_text()
    written = set(re.findall(r"`(mamba_jax_\w+)", text))
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names(server) if not name.endswith("_created")}
    assert bases == written, bases ^ written
    for name in ServerSettings.model_fields:
        if name != "default_sampling":
            assert f"`--{name.replace('_', '-')}" in text, name


def test_the_page_names_every_metric_of_tiers():
    sizes = Sizes(state=1, page=0, page_size=1, block=1)
    tiers = Tiers(Tier("host", 10, sizes), Tier("disk", 20, sizes), max_copying=1)
    found, families = tiers.snapshot(), Families()
    add_tiers(families, found)
    add_fetches(families, found)
    samples = [sample for metric in families.metrics() for sample in metric.samples]
    assert {sample.labels["tier"] for sample in samples} == {"host", "disk"}
    assert {sample.value for sample in samples if sample.name == "mamba_jax_tier_capacity_bytes"} == {10.0, 20.0}
    written = re.findall(r"`(mamba_jax_tier_\w+)", (ROOT / "docs/tiers.md").read_text())
    assert {sample.name for sample in samples} == set(written)
