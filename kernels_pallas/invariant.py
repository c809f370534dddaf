"""Implementations of operations on CPU in which the bits of a token's result do not depend on the schedule.

A token's result has the same bits whatever the number of rows, tiles or steps in the call, its place among them, and
where its sequence was cut. Sums run in C++, in an order that is fixed for each row (`native/product.h`); XLA computes
only elementwise functions and maxima of integers. Recurrences run token by token in prefill as in decode. Weights and
activations are float32 or bfloat16, sums and states float32. Programs must be compiled with `COMPILER_OPTIONS`.

An engine with `schedule_invariant` names these implementations for all operations.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, native
from kernels_pallas.fixed_order import NAME, fixed

F32 = jnp.float32
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""Otherwise a program may leave out a rounding to bfloat16 that another one does."""


def implementation(run: Callable[..., Any]) -> dispatch.Implementation:
    """The entry of an operation's table; only a name chooses it."""

    @functools.wraps(run)
    def run_fixed(*args: Any, **kwargs: Any) -> Any:
        with fixed():
            return run(*args, **kwargs)

    return dispatch.Implementation(NAME, run_fixed, unsupported, "cpu", automatic=False)


def unsupported(*args: Any, **kwargs: Any) -> str | None:
    """Why a call is not supported, or None."""
    arrays = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "dtype")]
    known = (F32, jnp.bfloat16)
    other = [leaf.dtype for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype not in known]
    return f"arrays are {other[0]}, not float32 or bfloat16" if other else native.WHY_MISSING
