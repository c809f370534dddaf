"""A run of gpu_check ends in time, and prints what it has measured."""

import json
import threading

import pytest

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.jobs import Job, Run, kernel_jobs, program_jobs, run_jobs
from benchmarks.gpu_check.sizes import Sizes
from serving.bench.report import emit


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def measuring(clock, metric, cases, seconds):
    """A job whose cases each take so many seconds."""

    def measure(run):
        for case in run.deadline.each(metric, cases):
            clock.now += seconds
            emit(metric=metric, case=case)
        return True

    return measure


def run_all(jobs, clock, seconds):
    deadline = Deadline(seconds, {job.label: job.share for job in jobs}, clock=clock)
    return run_jobs(jobs, Run(Sizes(), 1.0, deadline))


def test_a_job_stops_at_its_share_and_names_the_cases_left_out(clock, capsys):
    slow = Job("slow", 1, measuring(clock, "a", [1, 2, 3, 4], 20))
    next_ = Job("next", 1, measuring(clock, "b", [1, 2], 5))
    assert run_all([slow, next_], clock, 60) == 0
    assert printed(capsys) == [
        {"metric": "a", "case": 1},
        {"metric": "a", "case": 2},
        {"metric": "a", "skipped": "the time of this job is up", "cases": ["3", "4"]},
        {"metric": "b", "case": 1},
        {"metric": "b", "case": 2},
    ]


def test_time_that_a_job_leaves_goes_to_later_ones(clock, capsys):
    quick = Job("quick", 2, measuring(clock, "a", [1], 1))
    long = Job("long", 1, measuring(clock, "b", [1, 2, 3, 4, 5], 10))
    assert run_all([quick, long], clock, 60) == 0
    assert len(printed(capsys)) == 6


def test_jobs_after_the_end_of_the_run_are_reported(clock, capsys):
    first = Job("first", 1, measuring(clock, "a", [1], 70))
    second = Job("second", 1, measuring(clock, "b", [1], 1), "nemotron-h-8b")
    assert run_all([first, second], clock, 60) == 1
    assert printed(capsys) == [
        {"metric": "a", "case": 1},
        {"metric": "second nemotron-h-8b", "error": "not started: the time of the run is up"},
    ]


def test_a_failing_job_leaves_the_others_their_time(clock, capsys):
    def fail(run):
        raise RuntimeError("out of memory")

    jobs = [Job("failing", 1, fail), Job("next", 1, measuring(clock, "b", [1, 2], 20))]
    assert run_all(jobs, clock, 60) == 1
    assert [line["metric"] for line in printed(capsys)] == ["failing", "b", "b"]


def test_a_measurement_that_hangs_is_ended(capsys):
    ended = threading.Event()
    codes = []
    deadline = Deadline(0.0, {"decode": 1, "prefill": 1})
    with deadline.enforced(0.01, lambda code: (codes.append(code), ended.set())), deadline.job("decode"):
        assert ended.wait(60)
    assert codes == [1]
    assert printed(capsys) == [
        {"metric": "deadline", "error": "the time of the run is up", "unfinished": ["decode", "prefill"]}
    ]


def test_a_run_that_ends_in_time_is_not_ended():
    with Deadline(60.0, {}).enforced(0.0, lambda code: pytest.fail("the process was ended")):
        before = threading.active_count()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(60)
    assert threading.active_count() <= before


def test_the_most_important_figures_come_first():
    labels = [job.label for job in program_jobs(Sizes(), [[1]])]
    assert labels[:4] == ["greedy", *(f"{job} nemotron-h-8b" for job in ("decode", "prefill", "generate"))]
    assert len(set(labels)) == len(labels)
    names = [job.name for job in kernel_jobs()]
    first_sweep = next(place for place, name in enumerate(names) if name.startswith("sweep"))
    assert all(name.startswith("sweep") for name in names[first_sweep:])
