"""The products of a layer of experts, up and down, and both as one operation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.sizes import BF16, CLOSE, F32, I32, Sizes, compare
from benchmarks.gpu_check.timing import difference, seconds
from benchmarks.kernels.call import Draw
from benchmarks.kernels.calls import drawn
from benchmarks.kernels.workloads import ExpertMLP
from kernels_pallas.expert_mlp.pallas_gpu import MOST
from kernels_pallas.grouped_matmul import grouped_matmul
from serving.bench.report import emit

CHECKED = 32
"""Tokens whose products are computed one by one."""


def check_experts(sizes: Sizes, copy: float, deadline: Deadline) -> bool:
    """Decode of every number of rows, and a prompt. JAX's kernel for GPU has no interpreter: elsewhere, `xla` runs."""
    ok, (experts, size, width, chosen) = True, sizes.experts
    name = "xla" if sizes.interpret else "pallas_gpu"
    cases = (*(rows * chosen for rows in sizes.rows), sizes.prompt * chosen)
    for tokens in deadline.each("experts", cases):
        expert = np.sort(np.random.default_rng(0).integers(0, experts, tokens))
        groups = jnp.asarray(np.bincount(expert, minlength=experts), I32)
        for outputs, inputs in ((size, width), (width, size)):
            keys = jax.random.split(jax.random.key(0), 2)
            x = jax.random.normal(keys[0], (tokens, inputs), BF16)
            w = jax.random.normal(keys[1], (experts, outputs, inputs), BF16) / inputs**0.5
            run = jax.jit(lambda w, x, groups: (w, grouped_matmul(x, w, groups, implementation=name)), donate_argnums=0)
            some = np.linspace(0, tokens - 1, min(tokens, CHECKED)).astype(int)
            want = jnp.stack([w[expert[t]].astype(F32) @ x[t].astype(F32) for t in some])
            w, out = run(w, x, groups)
            error = difference(out[some], want)
            ok &= error < CLOSE["bfloat16"]
            timed = seconds(run, w, x, groups, calls=sizes.calls)
            moved = len(np.unique(expert)) * outputs * inputs * 2
            emit(
                metric="experts", by=name, tokens=tokens, outputs=outputs, inputs=inputs, us=round(timed * 1e6, 1),
                of_copy=round(moved / timed / copy, 3), error=error, ok=error < CLOSE["bfloat16"],
            )  # fmt: skip
    return ok


def check_expert_mlp(sizes: Sizes, copy: float, deadline: Deadline) -> bool:
    """The kernel against the operations one after the other, for every number of rows that it takes."""
    ok, (experts, size, width, chosen) = True, sizes.experts
    cases = ((rows, gated) for rows in sizes.rows for gated in (False, True) if rows <= MOST)
    for rows, gated in deadline.each("expert mlp", cases):
        call = drawn("expert_mlp", ExpertMLP("", rows, experts, chosen, width, size // (1 + gated), gated), Draw(BF16))

        x, up, down, *rows_of_experts = call.inputs

        def run(weights: Any, x: Any, rows: Any, *, call: Any = call, **how: Any) -> tuple[Any, jax.Array]:
            return weights, call.operation(x, *weights, *rows, **call.options, **how)

        ok &= compare(
            "expert_mlp", sizes, run, ["xla"], partial(jax.tree.map, jnp.copy, (up, down)), (x, rows_of_experts),
            rows=rows, gated=gated, moved=call.moved, copy=copy,
        )  # fmt: skip
    return ok
