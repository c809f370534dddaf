"""The process that runs kernels which may be wrong: see `serving.engine.assembly.kernel_check.run_child`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.load import load_config
from mamba_jax.kernel_check.calls import Sizes, calls_of, with_kernels
from mamba_jax.kernel_check.compare import compiled_comparison, compiled_timings
from mamba_jax.kernel_check.compiling import Compiler

MARGIN = 1.05
"""A kernel is not used if its calls together take longer than those of the plain form by this factor."""
BANDWIDTH, LOOP = 1e12, 1e-3
"""Bytes per second, and seconds, for which the number of calls in a timed loop is chosen."""


def main() -> None:
    """Reads a request as JSON from stdin, and reports on stdout."""
    request = json.load(sys.stdin)
    platform, skip = request["platform"], request["skip"]
    dtype = jnp.bfloat16 if request["dtype"] == "auto" else jnp.dtype(request["dtype"])
    drafts = request["num_speculative_tokens"]
    sizes = Sizes(
        rows=(8,), steps=tuple({1, 1 + drafts}), tokens=(4 * request["tile_size"],), tile_size=request["tile_size"],
        page_size=request["page_size"] or 32, intervals=(1, 16),
    )  # fmt: skip
    interpreted = platform == "cpu"
    config = load_config(request["model"], hf_overrides=request["hf_overrides"])
    calls = calls_of(config, "gpu" if interpreted else platform, sizes, dtype=dtype)
    compiler = Compiler()
    cases: dict[str, list[tuple[Future[Any], Future[Any] | None]]] = {}
    for call, kernel in with_kernels(calls, platform, interpreted=interpreted):
        if (name := f"{call.operation} {kernel}") in skip:
            continue
        timing = None
        if not interpreted:
            timing = compiler.submit(
                partial(compiled_timings, seconds=LOOP, bandwidth=BANDWIDTH, most=200), call, kernel, compiler
            )
        cases.setdefault(name, []).append((compiler.submit(compiled_comparison, call, kernel, compiler), timing))
    compiler.wait(1e9)
    print("ready", jax.devices()[0].device_kind, flush=True)
    for name, jobs in cases.items():
        print("run", name, flush=True)
        print("done", name, " ".join(_wrong(jobs, name.split()[1]).split()), flush=True)
    print("end", flush=True)
    os._exit(0)


def _wrong(jobs: list[tuple[Future[Callable[[], Any]], Future[Any] | None]], kernel: str) -> str:
    """What is wrong with a kernel, or nothing."""
    own = plain = 0.0
    try:
        for comparison, timing in jobs:
            if wrong := comparison.result()().wrong:
                return str(wrong)
            if timing is not None:
                for name, timed in timing.result().items():
                    seconds = timed.seconds()
                    own, plain = (own + seconds, plain) if name == kernel else (own, plain + seconds)
    except Exception as error:  # a compiler may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"it takes {own * 1e6:.1f} us, plain JAX {plain * 1e6:.1f} us" if own > plain * MARGIN else ""


if __name__ == "__main__":
    main()
