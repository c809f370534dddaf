"""The Grafana dashboard and the operations guide name metrics and flags that exist."""

import json
import re
from pathlib import Path

from serving.api.http.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[3]


def names(server) -> set[str]:
    """Every metric of a live server, as Prometheus would store it."""
    return {
        re.split(r"[{ ]", line)[0] for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#")
    } | set(re.findall(r"^# TYPE (\S+)", server.http.get("/metrics").text, re.M))


def test_the_dashboard_asks_for_metrics_that_exist(server):
    server.complete(max_tokens=2)
    board = json.loads((ROOT / "serving/api/grafana/dashboard.json").read_text())
    known = names(server)
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = set(re.findall(r"mamba_jax_\w+", target["expr"]))
            assert found, panel["title"]
            asked |= found
    assert asked <= known, asked - known


def test_the_guide_names_every_metric_and_setting(server):
    server.complete(max_tokens=2)
    text = (ROOT / "docs/operations.md").read_text()
    written = set(re.findall(r"`(mamba_jax_\w+)", text))
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names(server) if not name.endswith("_created")}
    assert bases == written, bases ^ written
    for name in ServerSettings.model_fields:
        if name != "default_sampling":
            assert f"`--{name.replace('_', '-')}" in text, name
