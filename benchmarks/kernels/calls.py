"""Calls of each operation at the sizes of `benchmarks.kernels.workloads`, for timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import workloads
from kernels_pallas import (
    causal_conv1d,
    delta_replay,
    delta_scan,
    delta_update,
    expert_choice,
    expert_mlp,
    gated_delta_replay,
    gated_delta_update,
    gated_norm,
    gated_replay,
    gated_scan,
    gated_update,
    grouped_matmul,
    linear,
    paged_attention,
    ssd_scan,
    state_replay,
    state_update,
)
from kernels_pallas.causal_conv1d import api as conv_api
from kernels_pallas.delta_scan import api as delta_scan_api
from kernels_pallas.delta_update import api as delta_update_api
from kernels_pallas.dispatch import Implementation
from kernels_pallas.expert_mlp import api as expert_mlp_api
from kernels_pallas.gated_delta_replay import api as delta_anchors_api
from kernels_pallas.gated_delta_update import api as gated_delta_api
from kernels_pallas.gated_norm import api as norm_api
from kernels_pallas.gated_replay import api as gated_replay_api
from kernels_pallas.gated_scan import api as gated_scan_api
from kernels_pallas.gated_update import api as gated_update_api
from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.linear import api as linear_api
from kernels_pallas.paged_attention import api as attention_api
from kernels_pallas.ssd_scan import api as scan_api
from kernels_pallas.state_replay import api as replay_api
from kernels_pallas.state_update import api as update_api
from mamba_jax.layout import PrefillLayout

TILES = 4
"""Tiles of one row, for the prefill operations."""
ROWS, CONTEXT = 8, 1024
"""Of attention in decode: rows, and tokens that each has."""
WIDTH = 4
"""Of the convolutions of gated delta nets."""


@dataclass(frozen=True)
class Call:
    """One operation with arguments; `store` is what is donated and comes back last, None where there is none. It may be
    several arrays."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    store: Any
    options: dict[str, Any]
    moved: int
    """Bytes that must be read and written at least: all arguments and results once, of a store the slots in use."""


class Draw:
    """Random arrays of a dtype."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self._rng = dtype, np.random.default_rng(0)

    def __call__(self, *shape: int) -> Any:
        return jnp.asarray(self._rng.standard_normal(shape, np.float32), self.dtype)

    def positive(self, *shape: int) -> Any:
        return jnp.asarray(self._rng.uniform(0.01, 0.2, shape), jnp.float32)


def _i32(values: Any) -> Any:
    return jnp.asarray(values, jnp.int32)


def _bytes(*arrays: Any) -> int:
    return sum(array.nbytes for array in arrays)


def _state(draw: Draw, shape: Any, slots: int) -> Any:
    return jnp.zeros((slots, shape.heads, shape.head_dim, shape.state), jnp.float32)


def _scan(draw: Draw, shape: Any) -> Call:
    lead, inner = (TILES, shape.tile_size), (shape.groups, shape.state)
    x, b, c = draw(*lead, shape.heads, shape.head_dim), draw(*lead, *inner), draw(*lead, *inner)
    dt, a, d = draw.positive(*lead, shape.heads), -draw.positive(shape.heads), draw.positive(shape.heads)
    store = _state(draw, shape, 4)
    moved = _bytes(x, x, dt, b, c, store[:2])
    return Call(ssd_scan.ssd_scan, (x, dt, a, b, c, d), store, _one_row_of_tiles(), moved)


def _one_row_of_tiles() -> dict[str, Any]:
    return {
        "tile_first": jnp.arange(TILES) == 0,
        "read_slot": jnp.full(TILES, 1, jnp.int32),
        "write_slot": _i32([0] * (TILES - 1) + [2]),
    }


def _gated_scan(draw: Draw, shape: Any) -> Call:
    tokens, inner = TILES * shape.tile_size, shape.heads * shape.head_dim
    zx, b, c = draw(tokens, 2, inner), *(draw(tokens, shape.groups, shape.state) for _ in range(2))
    dt, a, d = draw.positive(tokens, shape.heads), -draw.positive(shape.heads), draw.positive(shape.heads)
    weight, bias = draw(inner, shape.width), draw(inner) if shape.bias else None
    norm = draw(inner) if shape.norm else None
    stores = _state(draw, shape, 4), draw(4, shape.width - 1, inner)
    layout = PrefillLayout.of(
        num_packed=tokens,
        tile_size=shape.tile_size,
        length=_i32([tokens]),
        num_tokens=_i32([tokens]),
        read_slot=_i32([1]),
        tile_write_slot=_i32([0] * (TILES - 1) + [2]),
        page_table=_i32([[0]]),
    )
    options = {"eps": 1e-5, "norm_before_gate": shape.norm_before_gate, **layout.places}
    moved = _bytes(zx, zx[:, 0], dt, b, c, *(store[:2] for store in stores))

    def run(*args: Any, **options: Any) -> Any:
        *inputs, stores = args
        y, *new = gated_scan.gated_scan(*inputs, *stores, **options)
        return y, tuple(new)

    return Call(run, (zx, dt, a, b, c, d, weight, bias, norm), stores, options, moved)


def _update(draw: Draw, shape: Any) -> Call:
    lead, inner = (shape.rows, shape.steps), (shape.groups, shape.state)
    x, b, c = draw(*lead, shape.heads, shape.head_dim), draw(*lead, *inner), draw(*lead, *inner)
    dt, a, d = draw.positive(*lead, shape.heads), -draw.positive(shape.heads), draw.positive(shape.heads)
    places, slots = _a_slot_for_each_step(shape)
    store = _state(draw, shape, slots)
    moved = _bytes(x, x, dt, b, c) + _bytes(store[0]) * (shape.rows + slots - 1)
    return Call(state_update.state_update, (x, dt, a, b, c, d), store, places, moved)


def _of_mamba2(draw: Draw, shape: Any) -> tuple[Any, ...]:
    """The inputs of `gated_update`, channels and width of its second convolution, and options."""
    lead, inner, channels = (shape.rows, shape.steps), shape.heads * shape.head_dim, 2 * shape.groups * shape.state
    zx, bc = draw(*lead, 2, inner), draw(*lead, 2, shape.groups, shape.state)
    dt = draw(*lead, shape.heads).astype(jnp.float32)
    heads = [draw.positive(shape.heads) for _ in range(3)]
    of_x, of_bc = ((draw(n, shape.width), draw(n) if shape.bias else None) for n in (inner, channels))
    norm = draw(inner) if shape.norm else None
    inputs = zx, bc, dt, *heads, *of_x, *of_bc, norm
    return inputs, (channels, shape.width), {"eps": 1e-5, "dt_limit": (1e-3, math.inf)}


def _of_delta(draw: Draw, shape: Any) -> tuple[Any, ...]:
    """The inputs of `gated_delta_update`, channels and width of its second convolution, and options."""
    lead, inner, channels = (shape.rows, shape.steps), shape.heads * shape.head_dim, 2 * shape.groups * shape.state
    decays = shape.heads * (shape.state if shape.by_channel else 1)
    inputs = (
        draw(*lead, 2, shape.groups, shape.state), draw(*lead, inner), draw(*lead, inner),
        *(draw(*lead, n).astype(jnp.float32) for n in (decays, shape.heads)),
        draw.positive(shape.heads), draw.positive(decays),
        draw(inner, WIDTH), draw(channels, WIDTH), draw(shape.head_dim),
    )  # fmt: skip
    options = {"gates": gated_delta_update.Gates(beta_scale=1.0, log_decay_bound=None, output="silu", eps=1e-6)}
    return inputs, (channels, WIDTH), options


def _gated_update(draw: Draw, shape: Any) -> Call:
    return _between(gated_update.gated_update, draw, shape, *_of_mamba2(draw, shape))


def _gated_delta_update(draw: Draw, shape: Any) -> Call:
    return _between(gated_delta_update.gated_delta_update, draw, shape, *_of_delta(draw, shape))


def _gated_replay(draw: Draw, shape: Any) -> Call:
    return _anchored(gated_replay.gated_replay, draw, shape, _mamba2_tail(draw, shape), *_of_mamba2(draw, shape))


def _gated_delta_replay(draw: Draw, shape: Any) -> Call:
    ring, decays = (shape.rows + 1, shape.entries), shape.heads * (shape.state if shape.by_channel else 1)
    tail = delta_replay.DeltaTail(
        draw(*ring, shape.heads * shape.head_dim).astype(jnp.float32),
        draw(*ring, shape.groups * shape.state),
        -draw.positive(*ring, decays),
    )
    return _anchored(gated_delta_replay.gated_delta_replay, draw, shape, tail, *_of_delta(draw, shape))


def _between(
    operation: Callable[..., Any],
    draw: Draw,
    shape: Any,
    inputs: tuple[Any, ...],
    shared: tuple[int, int],
    options: dict[str, Any],
) -> Call:
    """Of decode, between a layer's projections. `shared`: channels and width of the windows that heads share."""
    (places, slots), (channels, width) = _a_slot_for_each_step(shape), shared
    places["valid"] = jnp.ones((shape.rows, shape.steps), bool)
    stores = (
        _state(draw, shape, slots),
        *(draw(slots, width - 1, n) for n in (shape.heads * shape.head_dim, channels)),
    )
    moved = _bytes(*(v for v in inputs if v is not None))
    moved += sum(_bytes(store[0]) for store in stores) * (shape.rows + slots - 1)

    def run(*args: Any, **places: Any) -> Any:
        *inputs, stores = args
        y, *new = operation(*inputs, *stores, **places, **options)
        return y, tuple(new)

    return Call(run, inputs, stores, places, moved)


def _a_slot_for_each_step(shape: Any) -> tuple[dict[str, Any], int]:
    """Where rows read and write, and how many slots that takes."""
    write = 1 + np.arange(shape.rows * shape.steps).reshape(shape.rows, shape.steps)
    return {"read_slot": _i32(write[:, 0]), "write_slot": _i32(write)}, write.size + 1


def _mamba2_tail(draw: Draw, shape: Any) -> Any:
    ring = shape.rows + 1, shape.entries
    return state_replay.Tail(
        draw(*ring, shape.heads * shape.head_dim),
        draw(*ring, shape.groups * shape.state),
        draw.positive(*ring, shape.heads),
    )


def _anchors(shape: Any, state: Any, tail: Any) -> tuple[dict[str, Any], int]:
    """Rows at every place between two boundaries, so that as many reach theirs as in the long run; what they move."""
    row, interval = np.arange(shape.rows), shape.interval
    since = row * interval // shape.rows
    places = {
        "anchor_slot": _i32(1 + row),
        "tail_id": _i32(1 + row),
        "anchor_length": _i32(interval + 0 * row),
        "length": _i32(interval + since),
        "num_tokens": _i32(shape.steps + 0 * row),
        "write_slot": _i32(1 + shape.rows + row),
        "interval": interval,
    }
    due = int((since + shape.steps >= interval).sum())
    of_token = sum(one[0, 0].nbytes for one in tail)
    return places, _bytes(state[0]) * (shape.rows + due) + of_token * int((since + shape.steps).sum())


def _replay(draw: Draw, shape: Any) -> Call:
    lead, inner = (shape.rows, shape.steps), (shape.groups, shape.state)
    x, b, c = draw(*lead, shape.heads, shape.head_dim), draw(*lead, *inner), draw(*lead, *inner)
    dt, a, d = draw.positive(*lead, shape.heads), -draw.positive(shape.heads), draw.positive(shape.heads)
    states, tail = _state(draw, shape, 2 * shape.rows + 1), _mamba2_tail(draw, shape)
    places, moved = _anchors(shape, states, tail)

    def run(*args: Any, **options: Any) -> Any:
        *inputs, store = args
        y, *new = state_replay.state_replay(*store, *inputs, **options)
        return y, tuple(new)

    return Call(run, (x, dt, a, b, c, d), (states, tail), places, moved + _bytes(x, x, dt, b, c))


def _anchored(
    operation: Callable[..., Any],
    draw: Draw,
    shape: Any,
    tail: Any,
    inputs: tuple[Any, ...],
    shared: tuple[int, int],
    options: dict[str, Any],
) -> Call:
    """As `_between`, for rows that are held by anchors."""
    (channels, width), slots = shared, 2 * shape.rows + 1
    states, entries = _state(draw, shape, slots), 1 << (width + shape.steps - 3).bit_length()
    windows = [
        one
        for n in (shape.heads * shape.head_dim, channels)
        for one in (draw(slots, width - 1, n), draw(shape.rows + 1, entries, n))
    ]
    places, moved = _anchors(shape, states, tail)
    moved += _bytes(*(v for v in inputs if v is not None)) + sum(_bytes(one[0]) for one in windows) * shape.rows

    def run(*args: Any, **places: Any) -> Any:
        *inputs, stores = args
        y, *new = operation(*inputs, *stores, **places, **options)
        return y, tuple(new)

    return Call(run, inputs, (states, tail, *windows), places, moved)


def _delta_scan(draw: Draw, shape: Any) -> Call:
    inputs, store = _delta_inputs(draw, shape, TILES, shape.tile_size), _state(draw, shape, 4)
    moved = _bytes(*inputs, inputs[2], store[:2])
    return Call(delta_scan.delta_scan, inputs, store, _one_row_of_tiles(), moved)


def _delta_update(draw: Draw, shape: Any) -> Call:
    inputs = _delta_inputs(draw, shape, shape.rows, shape.steps)
    places, slots = _a_slot_for_each_step(shape)
    store = _state(draw, shape, slots)
    moved = _bytes(*inputs, inputs[2]) + _bytes(store[0]) * (shape.rows + slots - 1)
    return Call(delta_update.delta_update, inputs, store, places, moved)


def _delta_inputs(draw: Draw, shape: Any, *lead: int) -> tuple[Any, ...]:
    q, k = (draw(*lead, shape.groups, shape.state) / shape.state**0.5 for _ in range(2))
    v, heads = draw(*lead, shape.heads, shape.head_dim), (*lead, shape.heads)
    gates = (*heads, shape.state) if shape.by_channel else heads
    return q, k, v, -draw.positive(*gates), draw.positive(*heads)


def _conv(draw: Draw, shape: Any) -> Call:
    x, weight = draw(ROWS, 1, shape.channels), draw(shape.channels, shape.width)
    bias = draw(shape.channels) if shape.bias else None
    store = draw(ROWS + 1, shape.width - 1, shape.channels)
    slots = np.arange(1, ROWS + 1)
    places = {"read_slot": _i32(slots), "write_slot": _i32(slots[:, None])}
    moved = _bytes(x, x, weight, store, store)
    return Call(causal_conv1d.causal_conv1d_update, (x, weight, bias), store, places, moved)


def _attention(draw: Draw, shape: Any) -> Call:
    pages = -(-CONTEXT // shape.page_size)
    q = draw(ROWS, 1, shape.q_heads, shape.head_dim)
    kv = draw(1 + ROWS * pages, shape.page_size, shape.entries, shape.head_dim)
    options = {
        "positions": jnp.full((ROWS, 1), CONTEXT - 1, jnp.int32),
        "page_table": _i32(1 + np.arange(ROWS * pages).reshape(ROWS, pages)),
        "block_row": jnp.arange(ROWS, dtype=jnp.int32),
        "scale": shape.head_dim**-0.5,
    }
    return Call(paged_attention.paged_attention, (q, kv), None, options, _bytes(q, q, kv))


def _norm(draw: Draw, shape: Any) -> Call:
    y, z, weight = draw(ROWS, shape.channels), draw(ROWS, shape.channels), draw(shape.channels)
    options = {"groups": shape.groups, "eps": 1e-5}
    return Call(gated_norm.gated_rms_norm, (y, z, weight), None, options, _bytes(y, y, z, weight))


def _grouped(draw: Draw, shape: Any) -> Call:
    x, w = draw(shape.tokens, shape.inputs), draw(shape.experts, shape.outputs, shape.inputs)
    each = np.bincount(np.random.default_rng(0).integers(0, shape.experts, shape.tokens), minlength=shape.experts)
    used = int((each > 0).sum())
    moved = _bytes(x) + w[0].nbytes * used + shape.tokens * shape.outputs * x.dtype.itemsize
    return Call(grouped_matmul.grouped_matmul, (x, w, _i32(each)), None, {}, moved)


def _expert_mlp(draw: Draw, shape: Any) -> Call:
    x, up = draw(shape.tokens, shape.inputs), draw(shape.experts, shape.size * (1 + shape.gated), shape.inputs)
    down = draw(shape.experts, shape.inputs, shape.size)
    rule, valid = expert_choice.Rule(shape.chosen, "softmax"), jnp.ones(shape.tokens, bool)
    scores = draw(shape.tokens, shape.experts).astype(jnp.float32)
    choice = expert_choice.choose_experts(scores, None, valid, _i32(0), own=shape.experts, rule=rule)
    options = {"activation": jax.nn.silu}
    moved = _bytes(x) * (1 + shape.chosen) + _bytes(up[0], down[0]) * int((choice.sizes > 0).sum())
    args = x / shape.inputs**0.5, up, down / shape.size**0.5, choice.order, choice.place, choice.sizes
    return Call(expert_mlp.expert_mlp, args, None, options, moved)


def _linear(draw: Draw, shape: Any) -> Call:
    x, weight = draw(shape.rows, shape.inputs), draw(shape.outputs, shape.inputs)
    moved = _bytes(x, weight) + shape.rows * shape.outputs * x.dtype.itemsize
    return Call(linear.linear, (x, weight), None, {}, moved)


@dataclass(frozen=True)
class Operation:
    """The timed calls of one operation."""

    call: Callable[[Draw, Any], Call]
    implementations: Sequence[Implementation]
    shapes: Sequence[Any]


OPERATIONS = {
    "ssd_scan": Operation(_scan, scan_api.SCAN, workloads.MAMBA2),
    "gated_scan": Operation(_gated_scan, gated_scan_api.GATED_SCAN, workloads.GATED),
    "state_update": Operation(_update, update_api.UPDATE, workloads.MAMBA2),
    "state_replay": Operation(_replay, replay_api.REPLAY, workloads.MAMBA2),
    "gated_update": Operation(_gated_update, gated_update_api.GATED_UPDATE, workloads.GATED),
    "gated_replay": Operation(_gated_replay, gated_replay_api.GATED_REPLAY, workloads.GATED),
    "gated_delta_replay": Operation(_gated_delta_replay, delta_anchors_api.GATED_DELTA_REPLAY, workloads.DELTA),
    "gated_delta_update": Operation(_gated_delta_update, gated_delta_api.GATED_DELTA_UPDATE, workloads.DELTA),
    "delta_scan": Operation(_delta_scan, delta_scan_api.SCAN, workloads.DELTA),
    "delta_update": Operation(_delta_update, delta_update_api.UPDATE, workloads.DELTA),
    "causal_conv1d_update": Operation(_conv, conv_api.UPDATE, workloads.CONVOLUTIONS),
    "paged_attention": Operation(_attention, attention_api.PAGED, workloads.ATTENTION),
    "gated_rms_norm": Operation(_norm, norm_api.NORM, workloads.NORMS),
    "grouped_matmul": Operation(_grouped, grouped_api.MATMUL, workloads.GROUPED_PRODUCTS),
    "expert_mlp": Operation(_expert_mlp, expert_mlp_api.MLP, workloads.EXPERT_MLPS),
    "linear": Operation(_linear, linear_api.LINEAR, workloads.PRODUCTS),
}


def runnable(operation: Operation, platform: str, interpreted: bool) -> Iterator[str]:
    """Names of the implementations that this platform can run."""
    for one in operation.implementations:
        if one.platform in (None, platform) and (interpreted or not one.name.endswith("_interpreted")):
            yield one.name
