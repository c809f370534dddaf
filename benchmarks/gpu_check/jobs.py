"""The jobs of a run, in their order, and how a run goes through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.gpu_check.attention import check_attention, sweep_attention
from benchmarks.gpu_check.between import check_between
from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.experts import check_expert_mlp, check_experts
from benchmarks.gpu_check.generation import check_greedy, time_generation
from benchmarks.gpu_check.programs import ModelPrograms, time_dispatch
from benchmarks.gpu_check.recurrences import DELTA, MAMBA2, check_scan, check_update, sweep_scan, sweep_update
from benchmarks.gpu_check.sizes import Sizes
from serving.bench.report import emit


class Run:
    """What jobs share: the sizes, the bandwidth of a copy, the time limit, and the model that is loaded."""

    def __init__(self, sizes: Sizes, copy: float, deadline: Deadline) -> None:
        self.sizes, self.copy, self.deadline = sizes, copy, deadline
        self._loaded: ModelPrograms | None = None

    def programs(self, model: str) -> ModelPrograms:
        """The model with this name; another one that is loaded is dropped first."""
        if self._loaded is None or self._loaded.name != model:
            self._loaded = None
            self._loaded = ModelPrograms(self.sizes, model, self.copy)
        return self._loaded


@dataclasses.dataclass(frozen=True)
class Job:
    """A part of a run."""

    name: str
    share: float
    """Of the time, in proportion to those of other jobs."""
    measure: Callable[[Run], bool]
    """Returns whether all checks passed."""
    model: str = ""

    @property
    def label(self) -> str:
        """The name, with the model."""
        return f"{self.name} {self.model}".strip()


def kernel_jobs() -> list[Job]:
    """Checks and times of each kernel, then sweeps over block sizes."""

    def delta(run: Run) -> Sizes:
        return run.sizes.of_delta()

    return [
        Job("update", 3, lambda run: check_update(MAMBA2, run.sizes, run.copy, run.deadline)),
        Job("gated-update", 2, lambda run: check_between("gated_update", run.sizes, run.copy, run.deadline)),
        Job("gated-replay", 2, lambda run: check_between("gated_replay", run.sizes, run.copy, run.deadline)),
        Job(
            "delta-replay", 2, lambda run: check_between("gated_replay", run.sizes, run.copy, run.deadline, erase=True)
        ),
        Job("gated-delta", 2, lambda run: check_between("gated_update", run.sizes, run.copy, run.deadline, erase=True)),
        Job("attention", 3, lambda run: check_attention(run.sizes, run.copy, run.deadline)),
        Job("scan", 2, lambda run: check_scan(MAMBA2, run.sizes, run.deadline)),
        Job("experts", 2, lambda run: check_experts(run.sizes, run.copy, run.deadline)),
        Job("expert-mlp", 2, lambda run: check_expert_mlp(run.sizes, run.copy, run.deadline)),
        Job("delta-update", 3, lambda run: check_update(DELTA, delta(run), run.copy, run.deadline)),
        Job("delta-scan", 2, lambda run: check_scan(DELTA, delta(run), run.deadline)),
        Job("sweep-update", 1, lambda run: sweep_update(MAMBA2, run.sizes, run.deadline)),
        Job("sweep-attention", 1, lambda run: sweep_attention(run.sizes, run.deadline)),
        Job("sweep-scan", 1, lambda run: sweep_scan(MAMBA2, run.sizes, run.deadline)),
        Job("sweep-delta-update", 1, lambda run: sweep_update(DELTA, delta(run), run.deadline)),
        Job("sweep-delta-scan", 1, lambda run: sweep_scan(DELTA, delta(run), run.deadline)),
    ]


def program_jobs(sizes: Sizes, golden: list[list[int]] | None) -> list[Job]:
    """For each model the most important figures first: decode without drafts, prefill, the engine."""
    jobs = [] if golden is None else [Job("greedy", 2, lambda run: check_greedy(golden))]
    for model in sizes.models:
        jobs += [
            Job("decode", 4, partial(_decode, model=model, steps=1), model),
            Job("prefill", 2, partial(_prefill, model=model), model),
            Job("generate", 4, partial(_generate, model=model), model),
            Job("mixed", 2, partial(_mixed, model=model), model),
        ]
        for steps in sizes.steps:
            if steps > 1:
                jobs.append(Job("drafts", 2, partial(_decode, model=model, steps=steps), model))
    return [*jobs, Job("dispatch", 1, lambda run: time_dispatch(run.sizes))]


def _decode(run: Run, model: str, steps: int) -> bool:
    return run.programs(model).time_decode(steps, run.deadline)


def _prefill(run: Run, model: str) -> bool:
    return run.programs(model).time_prefill(run.deadline)


def _mixed(run: Run, model: str) -> bool:
    return run.programs(model).time_mixed(run.deadline)


def _generate(run: Run, model: str) -> bool:
    return time_generation(run.programs(model), run.deadline)


def run_jobs(jobs: Sequence[Job], run: Run) -> int:
    """Runs jobs until the time is up; returns how many failed or did not start."""
    failed = 0
    for job in jobs:
        if run.deadline.is_over:
            failed += 1
            emit(metric=job.label, error="not started: the time of the run is up")
            continue
        try:
            with run.deadline.job(job.label):
                failed += not job.measure(run)
        except Exception as error:  # the other measurements are still wanted
            failed += 1
            emit(metric=job.label, error=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    return failed
