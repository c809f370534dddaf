"""`mamba-jax check --tiny`, rehearsed: every job measures something, and nothing is wrong."""

import json

import pytest

from serving.check import measurements
from serving.check.report import Report
from serving.cli.main import run

pytestmark = pytest.mark.slow


def test_every_job_measures(tmp_path):
    path = tmp_path / "figures.json"
    assert run(["check", "--tiny", "--seconds", "500", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    metrics = {one["metric"] for one in figures if not {"skipped", "error", "later"} & one.keys()}
    steps = {"decode step", "prefill step", "mixed step"}
    assert metrics >= steps | {"copy", "load", "generate", "greedy tokens", "bits", "kernel against plain", "kernel"}
    assert sum(one["metric"] == "collective" for one in figures) == 5  # of the tests' 8 devices
    assert [one for one in figures if one["metric"] == "kernel against plain" and "equal" not in one] == []


def test_another_token_is_wrong(tmp_path, monkeypatch):
    stored = json.loads(measurements.GREEDY.read_text())
    stored["tokens"][1][-1] += 1
    monkeypatch.setattr(measurements, "GREEDY", tmp_path / "greedy.json")
    measurements.GREEDY.write_text(json.dumps(stored))
    report = Report()
    assert not measurements.check_greedy(report)
    assert report.figures[0] == {"metric": "greedy tokens", "prompts": 3, "equal": 2}
