"""The process that runs kernels which may be wrong: see `serving.engine.assembly.kernel_check.run_child`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.load import Checkpoint
from mamba_jax.kernel_check.calls import Sizes, calls_of, with_kernels
from mamba_jax.kernel_check.compare import MARGIN, compiled_comparison, compiled_timings
from mamba_jax.kernel_check.compiling import Compiler
from mamba_jax.modules.quantized import quantized_weights
from mamba_jax.sharding.axis import LEAST_TOKENS
from serving.engine.assembly.kernel_check import UNJUDGED

BANDWIDTH, LOOP, MOST = 1e12, 1e-3, 200
"""Bytes per second, and seconds, for which the number of calls in a timed loop is chosen, and the most calls."""


def checked_sizes(
    *, tile_size: int, page_size: int, drafts: int = 0, interval: int = 16, members: int = 1, **dtypes: Any
) -> Sizes:
    """The steps whose calls are compared; `dtypes` are those of states, keys and values."""
    least = LEAST_TOKENS * members if members > 1 else 1  # a step that members divide
    return Sizes(
        rows=(8,), steps=tuple({1, 1 + drafts}), tokens=(-(-4 * tile_size // least) * least,),
        tile_size=tile_size, page_size=page_size, intervals=tuple({1, interval}), members=members, **dtypes,
    )  # fmt: skip


def main() -> None:
    """Reads a request as JSON from stdin, and reports on stdout."""
    request = json.load(sys.stdin)
    platform, skip = request["platform"], request["skip"]
    if (found := jax.default_backend()) != platform:  # another process may have the accelerator
        sys.exit(f"kernels are not checked: JAX runs on {found} instead of {platform}")
    interpreted = platform == "cpu"
    sizes = checked_sizes(
        tile_size=request["tile_size"], page_size=request["page_size"], drafts=request["num_speculative_tokens"],
        interval=request["replay_interval"] or 16, ssm_dtype=request["ssm_dtype"],
        kv_dtype=jnp.float8_e4m3fn if request["kv_cache_dtype"] == "fp8" else None,
        members=request["context_parallel_size"],
    )  # fmt: skip
    checkpoint = Checkpoint(
        request["model"], dtype=request["dtype"], quantization=request["quantization"],
        quantization_exclude=request["excluded"], hf_overrides=request["hf_overrides"],
        load_format=request["load_format"],
    )  # fmt: skip
    weights = checkpoint.shapes()
    calls = calls_of(
        checkpoint.config, "gpu" if interpreted else platform, sizes, dtype=weights["final_norm.weight"].dtype,
        weights=quantized_weights(weights),
    )  # fmt: skip
    compiler = Compiler(1 if request["alone"] else None)
    cases: dict[str, list[tuple[Future[Any], Future[Any] | None]]] = {}
    for call, kernel in with_kernels(calls, platform, interpreted=interpreted):
        if (name := f"{call.operation} {kernel}") in skip:
            continue
        timing = None
        if not interpreted:
            timings = partial(compiled_timings, seconds=LOOP, bandwidth=BANDWIDTH, most=MOST)
            timing = compiler.submit(_told, name, timings, call, kernel, compiler)
        compared = compiler.submit(_told, name, compiled_comparison, call, kernel, compiler)
        cases.setdefault(name, []).append((compared, timing))
    compiler.wait(1e9)
    _tell("ready", jax.devices()[0].device_kind)
    for name, jobs in cases.items():
        _tell("run", name)
        _tell("done", name, *_wrong(jobs, name.split()[1]).split())
    _tell("end")
    os._exit(0)


def _tell(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())  # one write, because threads tell, too


def _told(name: str, compile: Callable[..., Any], *arguments: Any) -> Any:
    _tell("compile", name)
    try:
        return compile(*arguments)
    finally:
        _tell("compiled", name)


def _wrong(jobs: list[tuple[Future[Callable[[], Any]], Future[Any] | None]], kernel: str) -> str:
    """What is wrong with a kernel, or nothing. An error while it runs ends the process: the device may be unusable."""
    own, plain, running = 0.0, 0.0, False
    try:
        programs = [(comparison.result(), {} if timing is None else timing.result()) for comparison, timing in jobs]
        running = True
        for compare, timings in programs:
            if wrong := compare().wrong:
                return str(wrong)
            for name, timed in timings.items():
                seconds = timed.seconds()
                own, plain = (own + seconds, plain) if name == kernel else (own, plain + seconds)
    except Exception as error:  # a compiler may raise anything
        why = f"{type(error).__name__}: {str(error)[:200]}"
        if running and not UNJUDGED.search(why):
            traceback.print_exc()
            os._exit(1)
        return why
    return f"it takes {own * 1e6:.1f} us, plain JAX {plain * 1e6:.1f} us" if own > plain * MARGIN else ""


if __name__ == "__main__":
    main()
