"""Each kernel at a model's shapes: compared with the plain form, and timed in turn with it."""

from __future__ import annotations

from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mamba_jax.kernel_check.calls import Call
from mamba_jax.kernel_check.compare import Timed, compiled_comparison, compiled_timings
from mamba_jax.kernel_check.compiling import Compiler
from serving.check.deadline import Deadline
from serving.check.report import Report

LONGEST = 4e-3
"""Seconds that a loop of calls should take."""
Cases = list[tuple[Call, str]]
"""Calls, each with the name of a kernel."""
MARGIN = 1.05
"""A kernel that takes longer than the plain form by this factor is reported as slower."""


class KernelCheck:
    """Compiles all cases at once; `compare` and `time` then run them one after the other."""

    def __init__(
        self, compared: Cases, timed: Cases, report: Report, compiler: Compiler, *, copy: float, most: int = 1000
    ) -> None:
        """`copy`: bytes per second of a copy, which tells how many calls, up to `most`, a loop has."""
        self._report, self._compiler, self._copy, self.failed = report, compiler, copy, 0
        time = partial(compiled_timings, seconds=LONGEST, bandwidth=copy, most=most)
        self._compared = [(*case, compiler.submit(compiled_comparison, *case, compiler)) for case in compared]
        self._timed = [(*case, compiler.submit(time, *case, compiler)) for case in timed]

    def compare(self, deadline: Deadline) -> None:
        """Compares each kernel with the plain form, on rows of all classes."""
        for call, kernel, compiling in deadline.each("kernel against plain", self._compared, named=_label):
            about = {"call": call.label, "kernel": kernel}
            try:
                found = compiling.result(max(1.0, deadline.left))()
                wrong = found.wrong
                about |= {"of allowed error": round(max(found.y, found.states), 4)} if not wrong else {}
            except (TimeoutError, CancelledError):
                self._report.add("kernel against plain", **about, skipped="it is not compiled yet")
                continue
            except Exception as error:  # the other cases are still wanted
                wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.failed += bool(wrong)
            self._report.add("kernel against plain", **about, **({"wrong": wrong} if wrong else {"equal": True}))

    def time(self, deadline: Deadline) -> None:
        """Times each kernel and the plain form, and reports both with the share of a copy's bandwidth."""
        slower = []
        if self._compiler.busy:
            raise TimeoutError("programs are still being compiled")
        for call, name, compiling in deadline.each("kernel", self._timed, named=_label):
            try:
                timed = compiling.result(max(1.0, deadline.left))
                kernel, plain = (timed[each].seconds() * 1e6 for each in (name, call.plain))
            except Exception as error:
                why = f"{type(error).__name__}: {str(error)[:300]}"
                self._report.add("kernel", call=call.label, by=name, error=why)
                continue
            moved = timed[name].moved
            if kernel > plain * MARGIN:
                slower.append(f"{call.label} by {name}: {kernel:.1f} us, plain {plain:.1f}")
            self._report.add(
                "kernel", call=call.label, by=name, us=round(kernel, 2), **{
                    "us plain": round(plain, 2), "times as fast": round(plain / kernel, 3),
                    "MB": round(moved / 1e6, 3), "of a copy": round(moved / kernel * 1e6 / self._copy, 3),
                },
            )  # fmt: skip
        self._report.add("slower kernels", count=len(slower), calls=slower)


def _label(case: tuple[Call, str, Any]) -> str:
    return case[0].label


def copy_bandwidth(nbytes: int, *, calls: int = 20) -> float:
    """Bytes per second, read plus written, of a large copy."""
    array = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32)
    make = jax.jit(lambda: (jnp.zeros(array.shape), ())).lower().compile()

    def loop(stores: Any, rest: Any) -> Any:
        return jax.lax.fori_loop(0, calls, lambda step, x: jax.lax.optimization_barrier(x + 1), stores), rest

    compiled = jax.jit(loop, donate_argnums=0).lower(array, ()).compile()
    return 2 * nbytes / Timed(make, compiled, calls, nbytes).seconds()
