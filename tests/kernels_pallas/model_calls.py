"""Calls of each operation at the sizes of `model_shapes`: as `mamba_jax.kernel_check` finds and fills them.

Tests run them, and compile them for accelerators that are not at hand.
"""

import functools
import math

import jax
import jax.numpy as jnp
import model_shapes

from kernels_pallas import dispatch, expert_choice
from kernels_pallas.causal_conv1d import api as conv_api
from kernels_pallas.expert_choice import api as choice_api
from kernels_pallas.expert_mlp import api as expert_mlp_api
from kernels_pallas.gated_norm import api as norm_api
from kernels_pallas.gated_recurrence import DeltaGates, Mamba2Gates, Projections, Weights, Windows
from kernels_pallas.gated_recurrence import api as gated_api
from kernels_pallas.grouped_matmul import api as grouped_api
from kernels_pallas.linear import api as linear_api
from kernels_pallas.paged_attention import api as attention_api
from kernels_pallas.places import Anchored, Rows, Tiles
from kernels_pallas.quantized import Quantized
from kernels_pallas.recurrence import Entry, Tail
from kernels_pallas.recurrence import api as recurrence_api
from kernels_pallas.selective_scan import SelectiveEntry, SelectiveTail
from kernels_pallas.selective_scan import api as selective_api
from mamba_jax.kernel_check.calls import Call
from mamba_jax.layout import PrefillLayout
from mamba_jax.modules.basic import activation

BF16, F32, FP8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
ROWS = 8
"""Of operations without rows of their own."""
SLOTS = 64
"""At least, so that a copy of a store is larger than the temporaries that a program may have."""


def shape(*sizes: int, dtype=F32) -> jax.ShapeDtypeStruct:
    """An array of this shape."""
    return jax.ShapeDtypeStruct(sizes, dtype)


ints = functools.partial(shape, dtype=jnp.int32)


def nbytes(*trees) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees) if hasattr(leaf, "shape"))


def entry(model, lead, dtype):
    if is_selective(model):
        x, b, c = (shape(*lead, n, dtype=dtype) for n in (model.inner, model.state, model.state))
        return SelectiveEntry(x, b, c, shape(*lead, model.inner))
    vector, heads = shape(*lead, model.groups, model.state, dtype=dtype), (*lead, model.heads)
    decays = shape(*heads, model.state) if model.by_channel else shape(*heads)
    return Entry(vector, vector, shape(*heads, model.head_dim, dtype=dtype), decays, shape(*heads))


def tail(model, dtype):
    ring = functools.partial(shape, model.rows + 1, model.entries)
    if is_selective(model):
        return SelectiveTail(ring(model.inner, dtype=dtype), ring(model.state, dtype=dtype), ring(model.inner))
    value = ring(model.heads * model.head_dim, dtype=F32 if model.erase else dtype)
    decays = ring(model.heads * (model.state if model.by_channel else 1))
    strength = None if model.erase else ring(model.heads)
    return Tail(value, ring(model.groups * model.state, dtype=dtype), decays, strength)


def is_selective(model):
    return not hasattr(model, "heads")


def store(model, slots, dtype):
    return shape(max(slots, SLOTS), *model.state_shape, dtype=dtype)


def fixed(model):
    """What a recurrence gets besides tokens and places."""
    if is_selective(model):
        return {"a": shape(model.state, model.inner), "d": shape(model.inner)}
    return {"erase": model.erase, "skip": None if model.erase or model.by_channel else shape(model.heads)}


def scan(model, dtype, states):
    number = model.tiles
    tiles = Tiles(shape(number, dtype=bool), ints(number), ints(number))
    tokens = entry(model, (number, model.tile_size), dtype)
    return {"entry": tokens, "store": store(model, number + 5, states), "tiles": tiles, **fixed(model)}


def rows_of(model):
    return Rows(ints(model.rows), ints(model.rows, model.steps))


def update(model, dtype, states):
    tokens, slots = entry(model, (model.rows, model.steps), dtype), model.rows * model.steps + 1
    return {"entry": tokens, "store": store(model, slots, states), "rows": rows_of(model), **fixed(model)}


def anchored(model):
    return Anchored(*[ints(model.rows)] * 6, model.interval)


def replay(model, dtype, states):
    tokens, slots = entry(model, (model.rows, model.steps), dtype), 2 * model.rows + 1
    kept = {"store": store(model, slots, states), "tail": tail(model, dtype)}
    return {"entry": tokens, **kept, "places": anchored(model), **fixed(model)}


def channels_of(model):
    """Of both convolutions."""
    return model.heads * model.head_dim, 2 * model.groups * model.state


def width_of(model):
    return getattr(model, "width", 4)


def gated(model, dtype):
    """Weights between the projections of a layer, and its gates."""
    inner, decays = channels_of(model)[0], model.heads * (model.state if model.by_channel else 1)
    biased = getattr(model, "bias", False)
    taps = [
        part
        for n in channels_of(model)
        for part in (shape(n, width_of(model), dtype=dtype), shape(n, dtype=dtype) if biased else None)
    ]
    norm = shape(model.head_dim if model.erase else inner, dtype=dtype) if getattr(model, "norm", True) else None
    skip = None if model.erase else shape(model.heads)
    weights = Weights(shape(model.heads), shape(decays), skip, *taps, norm)
    if model.erase:
        return weights, DeltaGates(beta_scale=1.0, log_decay_bound=None, activation="silu", eps=1e-6)
    return weights, Mamba2Gates((1e-3, math.inf), 1e-5, getattr(model, "norm_before_gate", False))


def gated_step(model, dtype):
    lead, (inner, _), (weights, gates) = (model.rows, model.steps), channels_of(model), gated(model, dtype)
    value, vectors = (shape(*lead, *n, dtype=dtype) for n in ([inner], [2, model.groups, model.state]))
    decay = shape(*lead, *weights.dt_bias.shape) if model.erase else None
    projections = Projections(value, value, vectors, decay, shape(*lead, model.heads))
    return {"projections": projections, "weights": weights, "gates": gates}


def gated_update(model, dtype, states):
    slots, lead = store(model, model.rows * model.steps + 1, states), (model.rows, model.steps)
    windows = Windows(*(shape(slots.shape[0], width_of(model) - 1, n, dtype=dtype) for n in channels_of(model)))
    places = {"rows": rows_of(model), "valid": shape(*lead, dtype=bool)}
    return {**gated_step(model, dtype), "store": slots, "windows": windows, **places}


def gated_replay(model, dtype, states):
    slots, width = store(model, 2 * model.rows + 1, states), width_of(model)
    ring = model.rows + 1, 1 << (width + model.steps - 3).bit_length()
    sizes = [(slots.shape[0], width - 1, n) for n in channels_of(model)] + [(*ring, n) for n in channels_of(model)]
    kept = {"store": slots, "tail": tail(model, dtype), "windows": Windows(*(shape(*n, dtype=dtype) for n in sizes))}
    return {**gated_step(model, dtype), **kept, "places": anchored(model)}


def packed(tokens, tile_size):
    """Of one row."""
    layout = functools.partial(PrefillLayout.of, num_packed=tokens, tile_size=tile_size)
    row, tiles = {name: ints(1) for name in ("length", "num_tokens", "read_slot")}, ints(-(-tokens // tile_size))
    return jax.eval_shape(layout, **row, tile_write_slot=tiles, page_table=ints(1, 1)).packed


def gated_scan(model, dtype, states):
    """One row, of so many tokens as its tiles have."""
    tokens, (inner, _), (weights, gates) = model.tiles * model.tile_size, channels_of(model), gated(model, dtype)
    vector, number = shape(tokens, model.groups, model.state, dtype=dtype), shape(tokens, model.heads)
    slots = store(model, model.tiles + 5, states)
    return {
        "zx": shape(tokens, 2, inner, dtype=dtype), "query": vector, "key": vector, "log_decay": number,
        "strength": number, "weights": weights, "store": slots,
        "windows": shape(slots.shape[0], model.width - 1, inner, dtype=dtype),
        "packed": packed(tokens, model.tile_size), "gates": gates,
    }  # fmt: skip


def convolution(model, dtype, lead, **places):
    n, bias = model.channels, shape(model.channels, dtype=dtype) if model.bias else None
    x, windows = (shape(*sizes, n, dtype=dtype) for sizes in (lead, (SLOTS, model.width - 1)))
    given = {"x": x, "taps": shape(n, model.width, dtype=dtype), "bias": bias, "windows": windows}
    return {**given, **places, "activation": "silu"}


def convolution_update(model, dtype, states):
    return convolution(model, dtype, (ROWS, 1), rows=Rows(ints(ROWS), ints(ROWS, 1)))


def convolution_prefill(model, dtype, states):
    tokens = 2 * model.tile_size
    return convolution(model, dtype, (tokens,), packed=packed(tokens, model.tile_size))


def attention(model, dtype, states):
    """Blocks of queries at the end of their rows' contexts."""
    pages, narrow = -(-model.context // model.page_size), min(dtype, states, key=lambda one: jnp.dtype(one).itemsize)
    return {
        "x": shape(model.blocks, model.q_len, model.q_heads, model.head_dim, dtype=dtype),
        "kv": shape(1 + model.rows * pages, model.page_size, model.entries, model.head_dim, dtype=narrow),
        "positions": ints(model.blocks, model.q_len), "page_table": ints(model.rows, pages),
        "block_row": ints(model.blocks), "scale": model.head_dim**-0.5, "first_key": 0, "window": None,
    }  # fmt: skip


def attention_part(model, dtype, states):
    """As if rows had eight times the pages, of which one member has these."""
    return {**attention(model, dtype, states), "first_page": ints(), "page_stride": 8}


def norm(model, dtype, states):
    x, weight = shape(ROWS, model.channels, dtype=dtype), shape(model.channels, dtype=dtype)
    options = {"groups": model.groups, "eps": 1e-5, "norm_before_gate": False, "activation": "silu"}
    return {"y": x, "gate": x, "norm": weight, **options}


def product(model, dtype, states):
    x, weight = (shape(n, model.inputs, dtype=dtype) for n in (model.rows, model.outputs))
    return {"x": x, "weight": weight, "out_dtype": jnp.dtype(dtype)}


def grouped(model, dtype, states):
    weight = shape(model.experts, model.outputs, model.inputs, dtype=dtype)
    return {"x": shape(model.tokens, model.inputs, dtype=dtype), "weight": weight, "group_sizes": ints(model.experts)}


def choice(model, dtype, states):
    rule = expert_choice.Rule(model.chosen, "scores", normalize=True, scaling=2.5)
    scores = {"scores": shape(model.tokens, model.experts), "bias": shape(model.experts)}
    return {**scores, "valid": shape(model.tokens, dtype=bool), "first": ints(), "own": model.experts, "rule": rule}


def quantized(*sizes, dtype, group=None, scale=F32, channels=F32, zero=False):
    """A weight [*lead, outputs, inputs]: with scales of channels (or None) and of groups of so many inputs."""
    *lead, outputs, inputs = sizes
    groups = [*lead, inputs // group, outputs] if group else []
    return Quantized(
        shape(*sizes, dtype=dtype),
        shape(*lead, outputs, dtype=channels) if channels else None,
        shape(*groups, dtype=scale) if group else None,
        shape(*groups, dtype=jnp.int8) if zero else None,
    )


FORMS = {
    "int8": {"dtype": jnp.int8},
    "fp8": {"dtype": FP8},
    "int4": {"dtype": jnp.int4, "group": 64, "scale": BF16, "channels": None},
    "gptq": {"dtype": jnp.int4, "group": 128, "channels": None, "zero": True},
    "nvfp4": {"dtype": jnp.float4_e2m1fn, "group": 16, "scale": FP8},
}
"""Of published weights."""


def published(form, *sizes):
    """A weight of these sizes in one of `FORMS`."""
    return quantized(*sizes, **FORMS[form])


def expert_weight(dtype, narrow, *sizes):
    """Also in 8 bits, as published: fp8 with a scale for 128 inputs."""
    if jnp.dtype(narrow).itemsize > 1:
        return shape(*sizes, dtype=dtype)
    return quantized(*sizes, dtype=narrow, channels=dtype, group=128 if narrow == FP8 else None)


def expert_mlp(model, dtype, states):
    weight, pairs = functools.partial(expert_weight, dtype, states, model.experts), ints(model.tokens * model.chosen)
    return {
        "x": shape(model.tokens, model.inputs, dtype=dtype), "up": weight(model.size * (1 + model.gated), model.inputs),
        "down": weight(model.inputs, model.size), "order": pairs, "place": pairs, "sizes": ints(model.experts),
        "activation": jax.nn.silu if model.gated else activation("relu2"),
    }  # fmt: skip


_M, _G, _D, _S = model_shapes.MAMBA2, model_shapes.GATED, model_shapes.DELTA, model_shapes.SELECTIVE
OPERATIONS = {
    "recurrence_scan": (scan, recurrence_api.SCAN, _M + _D),
    "recurrence_update": (update, recurrence_api.UPDATE, _M + _D),
    "recurrence_replay": (replay, recurrence_api.REPLAY, _M + _D),
    "gated_scan": (gated_scan, gated_api.GATED_SCAN, _G),
    "gated_update": (gated_update, gated_api.GATED_UPDATE, _G + _D),
    "gated_replay": (gated_replay, gated_api.GATED_REPLAY, _G + _D),
    "selective_scan": (scan, selective_api.SCAN, _S),
    "selective_update": (update, selective_api.UPDATE, _S),
    "selective_replay": (replay, selective_api.REPLAY, _S),
    "causal_conv1d_prefill": (convolution_prefill, conv_api.PREFILL, model_shapes.CONVOLUTIONS),
    "causal_conv1d_update": (convolution_update, conv_api.UPDATE, model_shapes.CONVOLUTIONS),
    "paged_attention": (attention, attention_api.PAGED, model_shapes.ATTENTION),
    "paged_attention_part": (attention_part, attention_api.PARTS, model_shapes.ATTENTION),
    "gated_rms_norm": (norm, norm_api.NORM, model_shapes.NORMS),
    "grouped_matmul": (grouped, grouped_api.MATMUL, model_shapes.GROUPED_PRODUCTS),
    "expert_choice": (choice, choice_api.CHOICE, model_shapes.EXPERT_MLPS),
    "expert_mlp": (expert_mlp, expert_mlp_api.MLP, model_shapes.EXPERT_MLPS),
    "linear": (product, linear_api.LINEAR, model_shapes.PRODUCTS),
}
"""By operation: the function (shape, dtype, dtype of states) -> arguments, implementations and shapes."""


def call_of(operation, model, dtype=BF16, states=F32, **options) -> Call:
    """A call of an operation at the sizes of `model`, of inputs and states of these dtypes."""
    arguments, implementations, _ = OPERATIONS[operation]
    return Call(model.name, operation, implementations, arguments(model, dtype, states) | options)


def program(call, implementation=None):
    """The function (stores, others) -> (stores, y) of arrays, as `Call.apart` gives them: the first to be donated."""

    def run(stores, others):
        args, kwargs = call.split(call.filled([*stores, *others]))
        out = dispatch.call(call.operation, call.candidates, implementation, *args, **kwargs)
        return (out[1:], out[0]) if stores else ((), out)

    return run
