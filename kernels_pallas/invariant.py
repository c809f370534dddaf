"""Implementations of operations on CPU in which the bits of a token's result do not depend on the schedule.

A token's result has the same bits whatever the number of rows, tiles or steps in the call, its place among them, and
where its sequence was cut. Sums run in C++, in an order that is fixed for each row (`native/product.h`); XLA computes
only elementwise functions and maxima of integers. Recurrences run token by token in prefill as in decode. Weights and
activations are float32 or bfloat16, sums and states float32. Programs must be compiled with `COMPILER_OPTIONS`.

An engine with `schedule_invariant` names these implementations for all operations.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch, native
from kernels_pallas.fixed_order import NAME, fixed

F32 = jnp.float32
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""Otherwise a program may leave out a rounding to bfloat16 that another one does."""
WHY_MISSING = native.why_incomplete()
"""Why this installation cannot run them; None if it can."""


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
    return f"arrays are {other[0]}, not float32 or bfloat16" if other else WHY_MISSING


def selective_scan(x, dt, a, b, c, d, store, **places):
    """See `selective_scan.api.selective_scan`."""
    return _scan_tiles(_selective(a, d), (x, dt, b, c), (dt != 0).any(axis=2), store, **places)


def selective_scan_sequence(x, dt, a, b, c, d, *, initial_state=None):
    """See `selective_scan.api.selective_scan_sequence`."""
    return _scan_sequences(_selective(a, d), (x, dt, b, c), x, initial_state, a.shape)


def selective_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `selective_scan.api.selective_update`."""
    return _selective(a, d)(x, dt, b, c, store, read_slot=read_slot, write_slot=write_slot)


def _selective(a, d):
    from kernels_pallas.selective_scan import native as update

    return lambda x, dt, b, c, store, **slots: update.selective_update(x, dt, a, b, c, d, store, **slots)


def _scan_tiles(update: Callable[..., Any], inputs: Sequence[Any], real, store, *, tile_first, read_slot, write_slot):
    """Runs the tiles through `update`, the operation of decode: its arguments are the inputs and a store.

    real [tiles, tile_size] is False for padding, which ends a tile. To C++, a negative slot to read means the state of
    the tile before.
    """
    last = jnp.maximum(real.sum(axis=1), 1) - 1
    write = jnp.where(jnp.arange(real.shape[1]) == last[:, None], write_slot[:, None], 0)
    return update(*inputs, store, read_slot=jnp.where(tile_first, read_slot, -1), write_slot=write)


def _scan_sequences(update: Callable[..., Any], inputs: Sequence[Any], y, initial_state, shape: tuple[int, ...]):
    """The same for whole sequences [batch, length, ...], from states [batch, *shape]; zeros if None."""
    batch, length = y.shape[:2]
    start = jnp.zeros((batch, *shape), F32) if initial_state is None else initial_state.astype(F32)
    rows = jnp.arange(1, batch + 1)
    write = jnp.where(jnp.arange(length) == length - 1, rows[:, None], 0)
    store = jnp.concatenate([jnp.zeros((1, *shape), F32), start])
    out, store = update(*inputs, store, read_slot=rows, write_slot=write)
    return out.astype(y.dtype), store[1:]
