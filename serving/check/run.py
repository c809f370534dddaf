"""The jobs of `mamba-jax check`, in their order."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.load import load_config
from mamba_jax.kernel_check.calls import Sizes, calls_of, with_kernels
from mamba_jax.kernel_check.compiling import Compiler
from serving.bench.report import environment
from serving.check.measurements import (
    Cases,
    check_bits,
    check_greedy,
    compare_kernels,
    copy_bandwidth,
    time_collectives,
    time_engine,
    time_kernels,
    wait_for_programs,
)
from serving.check.programs import ModelPrograms, Step
from serving.check.report import Deadline, Job, Report

GRACE = 20.0
"""Seconds after which a check that is over time is ended, in the middle of a measurement if necessary."""


def run_check(model: str | None, *, seconds: float, tiny: bool, path: Path | None) -> int:
    """Checks this machine within so many seconds; prints figures, and writes them to `path`.

    Args:
        model: a checkpoint or a published size; None: the demo model on a CPU, else nemotron-h-8b.
        tiny: small sizes, and interpreted kernels where this machine has none: does the check itself work?

    Returns:
        1 if a kernel or a token is wrong, or if something failed or was not started; else 0.
    """
    report = Report(path)
    deadline = Deadline(seconds, report)
    model = model or ("demo" if tiny or jax.default_backend() == "cpu" else "nemotron-h-8b")
    report.add(**environment(model))
    compiler = Compiler()
    with deadline.enforced(GRACE):
        wrong = _Check(model, tiny, report, deadline, compiler).run()
        report.add("check", model=model, wrong=wrong, failed=deadline.failed)
    code = int(bool(wrong or deadline.failed))
    if not compiler.close():
        os._exit(code)  # the interpreter would wait for compilations, which cannot be interrupted
    return code


class _Check:
    """The jobs of a check."""

    def __init__(self, model: str, tiny: bool, report: Report, deadline: Deadline, compiler: Compiler) -> None:
        self.model, self.tiny, self.report, self.deadline, self.compiler = model, tiny, report, deadline, compiler
        self.platform = jax.default_backend()
        self.wrong = 0

    def run(self) -> int:
        """Measures, the most important figures first; returns how many results were wrong."""
        small = self.tiny or self.platform == "cpu"
        dtype: Any = jnp.float32 if small else jnp.bfloat16
        rows: tuple[int, ...] = (1, 64, 8, 256)
        timed_rows: tuple[int, ...] = (8, 64)
        page = 128 if self.platform == "tpu" else 32  # as the engine's
        sizes = Sizes(tokens=(2048,), steps=(1, 4), context=4096, page_size=page, intervals=(1, 16))
        if small:
            sizes = Sizes(rows=(4,), tokens=(128,), context=64, page_size=16, tile_size=32)
            rows, timed_rows = (2, 4), sizes.rows
        copy = copy_bandwidth(1 << 22 if self.tiny else 1 << 30)
        self.report.add("copy", **{"GB/s": round(copy / 1e9, 1)})
        programs = self._load(copy, sizes, dtype)
        many = min(64, rows[-1])
        decode = [Step("decode", each) for each in rows]
        prefill = [Step("prefill", each) for each in (1, 4)]
        # Without CUDA graphs, so that a profile has every kernel.
        plain = Step("decode", rows[0], graph=self.platform != "gpu")
        others = [Step("mixed", many), Step("decode", many, drafts=3), Step("decode", rows[0], drafts=3)]
        if programs is not None and not programs.shape.unreplayable_state:
            others += [Step("decode", each, interval=16) for each in rows[1:]]

        def cases(wanted: Sizes) -> Cases:
            calls = calls_of(load_config(self.model), self.platform, wanted, dtype=dtype)
            return with_kernels(calls, self.platform, interpreted=self.tiny and self.platform != "gpu")

        def compare() -> None:
            self.wrong += compare_kernels(cases(sizes), self.report, self.compiler, self.deadline)

        def time() -> None:
            found = cases(dataclasses.replace(sizes, rows=timed_rows, steps=(1,)))
            own = [case for case in found if not case[0].inner]
            most = 2 if self.tiny else 1000
            time_kernels(own, self.report, self.compiler, self.deadline, copy=copy, most=most)

        def judge(check: Callable[[Report], bool]) -> None:
            self.wrong += not check(self.report)

        def steps(*wanted: Step) -> None:
            for step in wanted:
                programs.compile(step)
            wait_for_programs(self.compiler, self.report, self.deadline)
            for step in self.deadline.each("step", wanted):
                try:
                    if self.compiler.busy:
                        raise TimeoutError
                    programs.time(step, seconds=max(1.0, self.deadline.left))
                except (TimeoutError, CancelledError):
                    self.report.add("step", **step.about, later="programs are still being compiled")
                except Exception as error:  # the other steps are still wanted
                    programs.forget(step)
                    self.deadline.fail(f"step {step.about}", f"{type(error).__name__}: {str(error)[:300]}")

        def generate() -> None:
            requests, tokens = (4, 8) if self.tiny else (64, 128)
            time_engine(
                programs.model, self.model, self.report, self.compiler, requests=requests, tokens=tokens,
                left=self.deadline.left,
            )  # fmt: skip

        jobs = [
            Job("decode", 7, lambda: steps(*decode)),
            Job("prefill", 3, lambda: steps(*prefill)),
            Job("kernels against plain", 4, compare),
            Job("kernels", 4, time),
            Job("steps", 4, lambda: steps(plain, *others)),
            Job("generate", 5, generate),
            Job("kernels of a step", 1, lambda: programs.profile(plain)),
            Job("greedy tokens", 2, lambda: judge(check_greedy)),
            Job("bits", 1, lambda: judge(check_bits)),
            Job("late steps", 1, lambda: steps(*programs.left)),
            Job("collectives", 1, lambda: time_collectives(self.report)),
        ]
        without_model = ("kernels against plain", "kernels", "greedy tokens", "bits", "collectives")
        self.deadline.run([job for job in jobs if programs is not None or job.name in without_model])
        if programs is not None:
            self.report.add("implementations", chosen=programs.kernels)
        return self.wrong

    def _load(self, copy: float, sizes: Sizes, dtype: Any) -> Any:
        """The model's programs; None, reported, where it cannot be loaded: kernels are checked without its weights."""
        try:
            return ModelPrograms(
                self.model, self.report, self.compiler, copy=copy, context=sizes.context, prompt=sizes.tokens[0],
                page=sizes.page_size, tile=sizes.tile_size, dtype=dtype,
            )  # fmt: skip
        except Exception as error:
            self.deadline.fail("load", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
            return None
