"""A check ends in time, and keeps what it has measured."""

import json
import os
import threading
from functools import partial

import pytest

from serving.check.report import Deadline, Job, Report


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def run(jobs, seconds):
    """Runs jobs of (name, share, cases, seconds of each) within so many seconds; returns figures and failures."""
    clock, report = Clock(), Report()
    deadline = Deadline(seconds, report, clock=clock)

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
