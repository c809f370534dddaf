"""`mamba-jax check` ends in time, and keeps what it has measured. Rehearsed, every job measures something, and nothing
is wrong.
"""

import json
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from serving.check import measurements
from serving.check.report import Deadline, Job, Report
from serving.cli import main


def run(jobs, seconds):
    """Runs jobs of (name, share, cases, seconds of each) within so many seconds; returns figures and failures."""
    clock, report = SimpleNamespace(now=100.0), Report()
    deadline = Deadline(seconds, report, clock=lambda: clock.now)

    def measure(name, cases, each):
        if cases is None:
            raise RuntimeError("out of memory")
        for case in deadline.each(name, cases):
            clock.now += each
            report.add(name, case=case)

    deadline.run([Job(name, share, partial(measure, name, cases, each)) for name, share, cases, each in jobs])
    return [(one["metric"], next(k for k in one if k != "metric")) for one in report.figures], deadline.failed


@pytest.mark.parametrize(
    ("jobs", "seconds", "figures", "failed"),
    [
        ([("a", 1, [1, 2, 3, 4], 20), ("b", 1, [1, 2], 5)], 60, "a a a! b b", []),
        ([("a", 2, [1], 1), ("b", 1, [1, 2, 3, 4, 5], 10)], 60, "a b b b b b", []),
        ([("a", 1, [1], 70), ("b", 1, [1], 1)], 60, "a b?", ["b"]),
        ([("a", 1, None, 0), ("b", 1, [1, 2], 20)], 60, "a? b b", ["a"]),
    ],
    ids=["a share ends", "what a job leaves goes to later ones", "no time is left", "a failure ends only its job"],
)
def test_jobs_share_the_time(jobs, seconds, figures, failed):
    kinds = {"case": "", "skipped": "!", "error": "?"}
    found, wrong = run(jobs, seconds)
    assert " ".join(metric + kinds[kind] for metric, kind in found) == figures
    assert wrong == failed


def test_a_measurement_that_hangs_is_ended(tmp_path):
    ended, codes = threading.Event(), []
    path = tmp_path / "report.json"
    deadline = Deadline(0.0, Report(path))
    with deadline.enforced(0.01, lambda code: (codes.append(code), ended.set())):
        assert ended.wait(60)
    assert codes == [1]
    assert [figure["metric"] for figure in json.loads(path.read_text())] == ["deadline"]
    assert list(tmp_path.iterdir()) == [path], "the file is replaced as a whole"
    os.mkfifo(pipe := tmp_path / "pipe")
    end = os.open(pipe, os.O_RDWR)
    Report(pipe).add("figure")
    assert pipe.is_fifo(), "a pipe is not replaced"
    os.close(end)


def test_a_check_that_ends_in_time_is_not_ended():
    with Deadline(60.0, Report()).enforced(0.0, lambda code: pytest.fail("the process was ended")):
        pass
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(60)


@pytest.mark.slow
def test_every_job_measures(tmp_path):
    path = tmp_path / "figures.json"
    assert main.run(["check", "--tiny", "--seconds", "500", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    metrics = {one["metric"] for one in figures if not {"skipped", "error", "later"} & one.keys()}
    steps = {"decode step", "prefill step", "mixed step"}
    assert metrics >= steps | {"copy", "load", "generate", "greedy tokens", "bits", "kernel against plain", "kernel"}
    assert sum(one["metric"] == "collective" for one in figures) == 5  # of the tests' 8 devices
    assert [one for one in figures if one["metric"] == "kernel against plain" and "equal" not in one] == []


@pytest.mark.slow
def test_another_token_is_wrong(tmp_path, monkeypatch):
    stored = json.loads(measurements.GREEDY.read_text())
    stored["tokens"][1][-1] += 1
    monkeypatch.setattr(measurements, "GREEDY", tmp_path / "greedy.json")
    measurements.GREEDY.write_text(json.dumps(stored))
    report = Report()
    assert not measurements.check_greedy(report)
    assert report.figures[0] == {"metric": "greedy tokens", "prompts": 3, "equal": 2}
