"""The measured sizes, and the comparison of a kernel with other implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.timing import difference, seconds
from kernels_pallas.recurrence import Entry
from serving.bench.report import emit

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Of the largest value, by the dtype that results are rounded to."""
ROUNDED = 5e-3
"""Of float32 results of products whose operands are rounded to 16 bits."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One Mamba layer, and how much of everything is measured."""

    heads: int = 128
    head_dim: int = 64
    groups: int = 8
    state: int = 128
    tile_size: int = 128
    rows: tuple[int, ...] = (1, 8, 64, 256)
    steps: tuple[int, ...] = (1, 4)
    tiles: tuple[int, ...] = (16, 64)
    copied: int = 1 << 30
    calls: int = 30
    contexts: tuple[int, ...] = (4096, 32768)
    page_size: int = 64
    q_heads: int = 32
    kv_heads: int = 8
    key_dim: int = 128
    experts: tuple[int, int, int, int] = (128, 1856, 2688, 6)
    """Experts, channels of each, width of a token, experts that a token chooses: those of Nemotron-3-Nano."""
    delta: tuple[int, int, int, int] = (32, 128, 16, 128)
    """Heads, size of each, groups and keys' size of a gated delta net: those of Qwen3-Next-80B-A3B."""
    prompt: int = 2048
    requests: tuple[int, ...] = (64, 8)
    """Requests at once of the engine."""
    models: tuple[str, ...] = ("nemotron-h-8b", "nemotron-3-nano-30b-a3b")
    interpret: bool = False

    @property
    def kernel(self) -> str:
        """The name of the kernels' implementation."""
        return "pallas_gpu_interpreted" if self.interpret else "pallas_gpu"

    def slot_bytes(self, dtype: Any) -> int:
        """Of one state."""
        return self.heads * self.head_dim * self.state * jnp.dtype(dtype).itemsize

    def store(self, slots: int, dtype: Any) -> jax.Array:
        """States; NaN in the null slot."""
        shape = (slots, self.heads, self.head_dim, self.state)
        return jax.random.normal(jax.random.key(1), shape, dtype).at[0].set(jnp.nan)

    def layer(self, *lead: int) -> Entry:
        """Tokens [*lead] of a Mamba2 layer."""
        keys = iter(jax.random.split(jax.random.key(0), 5))
        inner = (*lead, self.groups, self.state)
        query, key = (jax.random.normal(next(keys), inner, BF16) for _ in range(2))
        value = jax.random.normal(next(keys), (*lead, self.heads, self.head_dim), BF16)
        step = jax.random.uniform(next(keys), (*lead, self.heads), F32, 0.001, 0.1)
        return Entry(query, key, value, -step * jax.random.uniform(next(keys), (self.heads,), F32, 1, 16), step)

    def of_delta(self) -> Sizes:
        """The same, with the gated delta net's layer in place of Mamba's."""
        heads, head_dim, groups, state = self.delta
        return dataclasses.replace(self, heads=heads, head_dim=head_dim, groups=groups, state=state)

    def delta_layer(self, *lead: int) -> Entry:
        """Tokens [*lead] of a gated delta net; queries and keys have length 1."""
        keys = iter(jax.random.split(jax.random.key(0), 5))
        q, k = (jax.random.normal(next(keys), (*lead, self.groups, self.state)) for _ in range(2))
        return Entry(
            *((one / jnp.linalg.norm(one, axis=-1, keepdims=True)).astype(BF16) for one in (q, k)),
            jax.random.normal(next(keys), (*lead, self.heads, self.head_dim), BF16),
            -jax.random.uniform(next(keys), (*lead, self.heads), F32, 0.001, 0.5),
            jax.random.uniform(next(keys), (*lead, self.heads), F32, 0.05, 0.95),
        )


TINY = Sizes(
    4, 16, 2, 16, 32, (4,), (2,), (2,), copied=1 << 16, calls=1, contexts=(64,), page_size=16, q_heads=4, kv_heads=2,
    key_dim=16, experts=(4, 64, 128, 2), delta=(4, 16, 2, 16), prompt=128, requests=(4,), models=("demo",),
    interpret=True,
)  # fmt: skip


def compare(
    metric: str,
    sizes: Sizes,
    run: Callable[..., Any],
    others: list[str],
    states: Callable[[], Any],
    args: Any,
    *,
    rounded: float = 0.0,
    **about: Any,
) -> bool:
    """Times `run(store, *args, implementation=)` by the kernel and by others; whether it gives what the first one does.

    There may be several arrays of states. They may differ by `rounded`, where products that they are made of round.
    `about` says what was run; `moved` bytes of it, if there, are turned into a bandwidth.
    """
    moved, copy = about.pop("moved", 0), about.pop("copy", 1)
    results = []
    for name in (sizes.kernel, *others):
        compiled = jax.jit(partial(run, implementation=name), donate_argnums=0)
        timed = seconds(compiled, states(), *args, calls=sizes.calls)
        rate = {"gb_per_s": round(moved / timed / 1e9, 1), "of_copy": round(moved / timed / copy, 3)} if moved else {}
        emit(metric=metric, by=name, us=round(timed * 1e6, 1), **about, **rate)
        results.append(compiled(states(), *args))
    (after, y), (want, want_y) = results[:2]
    stores = list(zip(jax.tree.leaves(after), jax.tree.leaves(want), strict=True))
    errors = {"y": difference(y, want_y), "states": max(difference(one[1:], other[1:]) for one, other in stores)}
    ok = errors["y"] < CLOSE[y.dtype.name] and errors["states"] < max(CLOSE[stores[0][0].dtype.name], rounded)
    emit(metric=f"{metric} against {others[0]}", ok=ok, **errors, **about)
    return ok
