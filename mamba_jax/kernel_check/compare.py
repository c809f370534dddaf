"""Compares an implementation of a call with the plain form, and times calls in a loop on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.kernel_check.calls import Call
from mamba_jax.kernel_check.compiling import Compiler
from mamba_jax.kernel_check.values import Values

WIDE, NARROW, STATES = 1e-3, 2e-2, 5e-3
"""Errors allowed of float32 results, of 16-bit results, and of float32 states made of 16-bit inputs: of the largest
number of the same row or slot, or of a twentieth of the largest of all, whichever is larger."""
MARGIN = 1.05
"""A kernel is slower if it takes longer than the plain form by this factor."""


class Comparison(NamedTuple):
    """How an implementation differs from the plain form."""

    y: float
    """The largest error of y as a share of what is allowed; NaN: a number is not finite where the plain one is."""
    states: float
    """Likewise of slots, tails and windows."""
    kept: bool
    """Slots that the plain form leaves as they are have the same bits as before."""
    repeated: bool
    """Two runs gave the same bits, as far as a digest tells."""

    @property
    def wrong(self) -> str:
        """What is wrong, or nothing."""
        parts = (
            (not self.y <= 1, f"its result has {self.y:.3g} of the allowed error"),
            (not self.states <= 1, f"its states have {self.states:.3g} of the allowed error"),
            (not self.kept, "it changes a slot that is not its row's"),
            (not self.repeated, "two runs differ"),
        )
        return "; ".join(text for bad, text in parts if bad)


def comparison(call: Call, implementation: str) -> Callable[[Any], Any]:
    """Returns a function of a seed, to be compiled: the first three fields of a `Comparison`, and a digest."""
    values = Values(call, classes=True)
    narrow = any(jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4 for leaf in call.arrays)

    def run(seed: Any) -> Any:
        arrays = lax.optimization_barrier(values.make(seed))
        arguments = call.filled(arrays)
        found = lax.optimization_barrier(call.run(implementation, arguments))
        plain = call.run(call.plain, arguments)
        real, plain_y = (_real(out[0], values.real) for out in (found, plain))
        y = states = jnp.float32(0)
        kept = jnp.bool(True)
        for one, right in zip(jax.tree.leaves(real), jax.tree.leaves(plain_y), strict=True):
            y = jnp.maximum(y, _error(one, right, NARROW if right.dtype.itemsize < 4 or narrow else WIDE))
        for name, want in plain[1].items():
            for new, old, right in zip(
                *(jax.tree.leaves(tree) for tree in (found[1][name], arguments[name], want)), strict=True
            ):
                new, old, right = new[1:], old[1:], right[1:]
                allowed = NARROW if right.dtype.itemsize < 4 else STATES if narrow else WIDE
                states = jnp.maximum(states, _error(new, right, allowed))
                untouched = _same(right, old).reshape(len(right), -1).all(1)
                changed = ~_same(new, old).reshape(len(right), -1).all(1)
                kept &= ~(untouched & changed).any()
        # Null slots mean nothing.
        return y, states, kept, _digest(jax.tree.leaves((real, jax.tree.map(lambda store: store[1:], found[1]))))

    return run


def compiled_comparison(call: Call, implementation: str, compiler: Compiler) -> Callable[..., Comparison]:
    """Compiles the function of `comparison`, and returns one that runs it with some seed."""
    compared = jax.jit(comparison(call, implementation))
    program = compiler.compiled(lambda: compared.lower(jax.ShapeDtypeStruct((), jnp.uint32)))

    def run(seed: int = 0) -> Comparison:
        y, states, kept, digest = (v.item() for v in program(jnp.uint32(seed)))
        return Comparison(y, states, kept, digest == program(jnp.uint32(seed))[-1].item())

    return run


def _digest(arrays: list[jax.Array]) -> jax.Array:
    """A number that changes, nearly always, where a bit of an array does."""
    total = jnp.uint32(0)
    for array in arrays:
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
        place = jnp.arange(array.size, dtype=jnp.uint32) * jnp.uint32(2654435761)
        total = total * 31 + (array.astype(jnp.uint32).reshape(-1) * (place | 1)).sum(dtype=jnp.uint32)
    return total


def _real(y: Any, real: Any) -> Any:
    """y with zeros where it is that of padding, and of no meaning."""
    if real is None or y is None:
        return y
    return jax.tree.map(lambda v: jnp.where(real.reshape(*real.shape, *[1] * (v.ndim - real.ndim)), v, 0), y)


def _error(found: jax.Array, plain: jax.Array, allowed: float) -> jax.Array:
    """The largest error over rows, as a share of what is allowed, where the plain form is finite."""
    if not jnp.issubdtype(plain.dtype, jnp.floating):
        return jnp.where(jnp.array_equal(found, plain), 0.0, jnp.inf).astype(jnp.float32)
    rows = plain.shape[0] if plain.ndim > 1 else 1
    found, plain = (v.astype(jnp.float32).reshape(rows, -1) for v in (found, plain))
    known = jnp.isfinite(plain)
    size = jnp.where(known, jnp.abs(plain), 0)
    scale = jnp.maximum(size.max(1), size.max() / 20) + 1e-30
    error = jnp.where(known, jnp.abs(found - plain), 0).max(1) / scale
    return (error / allowed).max()


def _same(one: jax.Array, other: jax.Array) -> jax.Array:
    return (one == other) | (jnp.isnan(one) & jnp.isnan(other))


class Timed(NamedTuple):
    """A loop of calls on the device, compiled."""

    make: Callable[[], Any]
    loop: Callable[..., Any]
    calls: int
    moved: int

    def seconds(self, repeats: int = 3) -> float:
        """Of one call: the least of several runs of the loop, after one that is not counted."""
        stores, rest = self.make()
        out = self.loop(stores, rest)
        jax.block_until_ready(out)
        best = float("inf")
        for _ in range(repeats):
            begin = time.perf_counter()
            out = self.loop(out[0], rest)
            jax.block_until_ready(out)
            best = min(best, time.perf_counter() - begin)
        return best / self.calls


_UNROLLED = 8
"""Calls of a short kernel in one turn of the loop, so that the turn itself takes no part."""
_FEW, _OVERHEAD = 80, 4e-6
"""Calls up to which the loop is not unrolled, and seconds that a call takes if it moves nothing."""
_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
"""What a GPU may launch together (see `mamba_jax.programs.platform_options`): the body of the loop, not the loop."""


def timing(call: Call, implementation: str, *, calls: int) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Returns a function that makes the arrays, and one, (stores, others) -> (stores, y), of as many calls; both to be
    compiled, the second with its first argument donated.

    The stores are updated in place, as in a step. Barriers keep the compiler from moving a call out of the loop.
    """
    values = Values(call, classes=False)

    def make() -> Any:
        return call.apart(values.make(0))

    def loop(stores: list[Any], others: list[Any]) -> Any:
        def body(step: Any, carry: Any) -> Any:
            stores, rest, _ = lax.optimization_barrier((carry[0], others, step))
            y, new = call.run(implementation, call.filled([*stores, *rest]))
            after = [leaf for name in sorted(new) for leaf in jax.tree.leaves(new[name])]
            return after or stores, y

        y = jax.eval_shape(lambda stores: body(0, (stores, None))[1], stores)
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), y)
        return lax.fori_loop(0, calls, body, (stores, empty), unroll=_UNROLLED if calls % _UNROLLED == 0 else 1)

    return make, loop


def calls_for(seconds: float, each: float, most: int) -> int:
    """The number of calls, up to `most`, in a loop that is to take so long."""
    calls = min(most, round(seconds / (each + _OVERHEAD)) + 1)
    return -(-calls // _UNROLLED) * _UNROLLED if calls > _FEW else max(calls, 2)


def compiled_timings(
    call: Call, implementation: str, compiler: Compiler, *, seconds: float, bandwidth: float, most: int
) -> dict[str, Timed]:
    """Compiles loops of the implementation and of the plain form, of as many calls, up to `most`, as probably take so
    long; by name."""
    moved = Values(call, classes=False).moved
    calls = calls_for(seconds, moved / bandwidth, most)
    options = {"xla_gpu_enable_command_buffer": _GRAPH} if jax.default_backend() == "gpu" else None

    def lower(loop: Callable[..., Any], shapes: Any) -> jax.stages.Lowered:
        return jax.jit(loop, donate_argnums=0).lower(*shapes)

    made: Any = None
    found = {}
    for name in (implementation, call.plain):
        make, loop = timing(call, name, calls=calls)
        made = made or compiler.compiled(jax.jit(make).lower)
        compiled: Any = compiler.compiled(partial(lower, loop, jax.eval_shape(make)), options)
        found[name] = Timed(made, compiled, calls, moved)
    return found
