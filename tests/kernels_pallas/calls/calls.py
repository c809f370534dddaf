"""Calls of each operation at the sizes of `tests.kernels_pallas.calls.workloads`, with drawn arrays or as shapes only.

Tests run them, and compile them for accelerators that are not at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import (
    causal_conv1d,
    expert_choice,
    expert_mlp,
    gated_norm,
    grouped_matmul,
    linear,
    paged_attention,
)
from kernels_pallas.causal_conv1d import api as conv_api
from kernels_pallas.dispatch import Implementation
from kernels_pallas.expert_choice import api as choice_api
from kernels_pallas.expert_mlp import api as expert_mlp_api
from kernels_pallas.gated_norm import api as norm_api
from kernels_pallas.gated_recurrence import api as gated_api
from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.linear import api as linear_api
from kernels_pallas.paged_attention import api as attention_api
from kernels_pallas.places import Rows
from kernels_pallas.recurrence import api as recurrence_api
from kernels_pallas.selective_scan import api as selective_api
from mamba_jax.modules.basic import activation
from tests.kernels_pallas.calls import recurrences, workloads
from tests.kernels_pallas.calls.call import Call, Draw, i32, nbytes, slot_bytes

ROWS = 8
"""Of operations without rows of their own."""


def _conv(draw: Draw, shape: Any) -> Call:
    x, weight = draw(ROWS, 1, shape.channels), draw(shape.channels, shape.width)
    bias = draw(shape.channels) if shape.bias else None
    store = draw(max(ROWS + 1, draw.slots), shape.width - 1, shape.channels)
    slots = np.arange(1, ROWS + 1)
    places = {"rows": Rows(i32(slots), i32(slots[:, None]))}
    moved = nbytes(x, x, weight) + 2 * ROWS * slot_bytes(store)
    return Call(causal_conv1d.causal_conv1d_update, (x, weight, bias), (store,), places, moved=moved)


def _attention(draw: Draw, shape: Any) -> Call:
    """Blocks of queries at the end of their rows' contexts."""
    pages, rows = -(-shape.context // shape.page_size), shape.rows
    q = draw(shape.blocks, shape.q_len, shape.q_heads, shape.head_dim)
    dtype = min(draw.dtype, draw.store, key=lambda dtype: dtype.itemsize)
    kv = draw(1 + rows * pages, shape.page_size, shape.entries, shape.head_dim, dtype=dtype)
    places = {
        "positions": jnp.full((shape.blocks, shape.q_len), shape.context - 1, jnp.int32),
        "page_table": i32(1 + np.arange(rows * pages).reshape(rows, pages)),
        "block_row": i32(np.arange(shape.blocks) * rows // shape.blocks),
    }
    options = {"scale": shape.head_dim**-0.5}
    return Call(paged_attention.paged_attention, (q, kv), (), places, options, nbytes(q, q, kv))


def _norm(draw: Draw, shape: Any) -> Call:
    y, z, weight = draw(ROWS, shape.channels), draw(ROWS, shape.channels), draw(shape.channels)
    options = {"groups": shape.groups, "eps": 1e-5}
    return Call(gated_norm.gated_rms_norm, (y, z, weight), options=options, moved=nbytes(y, y, z, weight))


def _linear(draw: Draw, shape: Any) -> Call:
    x, weight = draw(shape.rows, shape.inputs), draw.weight(shape.outputs, shape.inputs)
    moved = nbytes(x, weight) + shape.rows * shape.outputs * x.dtype.itemsize
    return Call(linear.linear, (x, weight), moved=moved)


def _grouped(draw: Draw, shape: Any) -> Call:
    x, weight = draw(shape.tokens, shape.inputs), draw.weight(shape.experts, shape.outputs, shape.inputs)
    each = np.bincount(np.random.default_rng(0).integers(0, shape.experts, shape.tokens), minlength=shape.experts)
    moved = nbytes(x) + nbytes(weight) * int((each > 0).sum()) // shape.experts
    moved += shape.tokens * shape.outputs * x.dtype.itemsize
    return Call(grouped_matmul.grouped_matmul, (x, weight, i32(each)), moved=moved)


def _expert_choice(draw: Draw, shape: Any) -> Call:
    scores, bias = draw(shape.tokens, shape.experts, dtype=jnp.float32), draw(shape.experts, dtype=jnp.float32)
    rule = expert_choice.Rule(shape.chosen, "scores", normalize=True, scaling=2.5)
    options = {"own": shape.experts, "rule": rule}
    inputs = scores, bias, jnp.ones(shape.tokens, bool), i32(0)
    return Call(expert_choice.choose_experts, inputs, options=options, moved=nbytes(scores))


def _expert_mlp(draw: Draw, shape: Any) -> Call:
    x, random = draw(shape.tokens, shape.inputs), np.random.default_rng(0)
    up = draw.weight(shape.experts, shape.size * (1 + shape.gated), shape.inputs)
    down = draw.weight(shape.experts, shape.inputs, shape.size)
    scores = random.normal(size=(shape.tokens, shape.experts))
    rule, valid = expert_choice.Rule(shape.chosen, "softmax"), np.ones(shape.tokens, bool)
    with jax.ensure_compile_time_eval():
        known = jnp.asarray(scores, jnp.float32), None, jnp.asarray(valid), i32(0)
        choice = expert_choice.choose_experts(*known, own=shape.experts, rule=rule, implementation="xla")
        used = int((choice.sizes > 0).sum())
    moved = nbytes(x) * (1 + shape.chosen) + nbytes(up, down) * used // shape.experts
    inputs = x / shape.inputs**0.5, up, down, choice.order, choice.place, choice.sizes
    options = {"activation": jax.nn.silu if shape.gated else activation("relu2")}
    return Call(expert_mlp.expert_mlp, inputs, options=options, moved=moved)


@dataclass(frozen=True)
class Operation:
    """The calls of one operation."""

    call: Callable[[Draw, Any], Call]
    implementations: Sequence[Implementation]
    shapes: Sequence[Any]


_M, _G, _D, _S = workloads.MAMBA2, workloads.GATED, workloads.DELTA, workloads.SELECTIVE
OPERATIONS = {
    "recurrence_scan": Operation(recurrences.scan_call, recurrence_api.SCAN, _M + _D),
    "recurrence_update": Operation(recurrences.update_call, recurrence_api.UPDATE, _M + _D),
    "recurrence_replay": Operation(recurrences.replay_call, recurrence_api.REPLAY, _M + _D),
    "gated_scan": Operation(recurrences.gated_scan_call, gated_api.GATED_SCAN, _G),
    "gated_update": Operation(recurrences.gated_update_call, gated_api.GATED_UPDATE, _G + _D),
    "gated_replay": Operation(recurrences.gated_replay_call, gated_api.GATED_REPLAY, _G + _D),
    "selective_scan": Operation(recurrences.selective_scan_call, selective_api.SCAN, _S),
    "selective_update": Operation(recurrences.selective_update_call, selective_api.UPDATE, _S),
    "selective_replay": Operation(recurrences.selective_replay_call, selective_api.REPLAY, _S),
    "causal_conv1d_update": Operation(_conv, conv_api.UPDATE, workloads.CONVOLUTIONS),
    "paged_attention": Operation(_attention, attention_api.PAGED, workloads.ATTENTION),
    "gated_rms_norm": Operation(_norm, norm_api.NORM, workloads.NORMS),
    "grouped_matmul": Operation(_grouped, grouped_api.MATMUL, workloads.GROUPED_PRODUCTS),
    "expert_choice": Operation(_expert_choice, choice_api.CHOICE, workloads.EXPERT_MLPS),
    "expert_mlp": Operation(_expert_mlp, expert_mlp_api.MLP, workloads.EXPERT_MLPS),
    "linear": Operation(_linear, linear_api.LINEAR, workloads.PRODUCTS),
}


def drawn(name: str, shape: Any, draw: Draw) -> Call:
    """Returns a call of the operation `name` at the sizes of `shape`."""
    return _made(name, shape, draw, lambda arrays: jax.jit(arrays)())


def shapes_of(name: str, shape: Any, draw: Draw) -> Call:
    """As `drawn`, but all arrays are shapes only."""
    return _made(name, shape, draw, jax.eval_shape)


def _made(name: str, shape: Any, draw: Draw, run: Callable[..., Any]) -> Call:
    made: list[Call] = []

    def arrays() -> Any:
        made.append(OPERATIONS[name].call(draw, shape))
        return made[0].arrays

    stores, inputs, places = run(arrays)
    return replace(made[0], stores=stores, inputs=inputs, places=places)
