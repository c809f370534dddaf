"""Time operations on a store that is updated in place, and compare with the bandwidth of a copy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.deadline import Deadline
from serving.bench.report import emit, median


def seconds(run: Callable[..., Any], store: Any, *args: Any, calls: int) -> float:
    """Of one call of `run(store, *args) -> (store, anything)`, each on the store that the one before left behind.

    The median of five times `calls` calls, after one to compile. The store passed in is used up.
    """
    store, out = run(store, *args)
    jax.block_until_ready((store, out))
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            store, out = run(store, *args)
        jax.block_until_ready((store, out))
        found.append((time.perf_counter() - begin) / calls)
    return median(found)


def copy_bandwidth(nbytes: int, *, calls: int) -> float:
    """Bytes per second, read plus written, of a large copy."""
    add = jax.jit(lambda x: (x + 1, 0), donate_argnums=0)
    return 2 * nbytes / seconds(add, jnp.zeros(nbytes // 4, jnp.float32), calls=calls)


def difference(actual: jax.Array, expected: jax.Array) -> float:
    """The largest one, relative to the largest value."""
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.abs(actual - expected).max() / jnp.maximum(jnp.abs(expected).max(), 1e-30))


def fastest(metric: str, of: Callable[..., float], axes: dict[str, tuple[int, ...]], deadline: Deadline) -> None:
    """Times combinations until the deadline, and reports the best five and those that do not compile."""
    found, failing = [], []
    for values in deadline.each(f"{metric}, block sizes", itertools.product(*axes.values())):
        choice = dict(zip(axes, values, strict=True))
        try:
            found.append((of(**choice), choice))
        except Exception as error:  # too many registers, or too much shared memory
            failing.append({**choice, "error": " ".join(str(error).split())[:80]})
    for timed, choice in sorted(found, key=lambda pair: pair[0])[:5]:
        emit(metric=f"{metric}, block sizes", us=round(timed * 1e6, 1), **choice)
    if failing:
        emit(metric=f"{metric}, block sizes not possible", choices=failing)
