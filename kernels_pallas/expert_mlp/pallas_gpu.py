"""The MLPs of experts as two Triton kernels, for the few tokens of a decode step.

A program of either kernel computes a block of outputs of one expert, for all of its tokens: it reads each weight once.
Its product has a row for each token of the step, so tokens need not be sorted, and the first kernel takes them as they
are. Programs of rows that are not the first of their expert end at once. Both write a row for each token and each of
its experts, so that what follows (the sum by token) reads no places.

Weights in 8 bits are widened in registers, which is exact; sums are multiplied by scales.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.quantized import Quantized
from kernels_pallas.triton_blocks import LEAST, dot, offsets_overflow, power_of_two_in

F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
NARROW = (jnp.int8, jnp.float8_e4m3fn)
MOST = 32  # tokens; an expert's product computes all of them
OUTPUTS, INPUTS, STAGES = 64, 128, 4


def unsupported(x, up, down, order, place, sizes, *, activation):
    if x.shape[0] > MOST:
        return f"{x.shape[0]} tokens, more than {MOST}"
    if any(size % LEAST for size in down.shape[1:]):
        return f"weights are {down.shape[1]} x {down.shape[2]}, not multiples of {LEAST}"
    for weight in map(_quantized, (up, down)):
        narrow, dtype = weight.values.dtype in NARROW, weight.values.dtype
        if x.dtype not in ((BF16,) if narrow else (BF16, F32)) or not (narrow or dtype == x.dtype):
            return f"it multiplies {x.dtype} by {dtype}"
        if weight.group_zero is not None or _piece(weight) < LEAST:
            return "weights have zero points, or a scale for fewer inputs than 16"
    if any(offsets_overflow(_quantized(weight).values) for weight in (up, down)):
        return "the weights have too many elements for 32-bit offsets"
    return None


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def expert_mlp(x, up, down, order, place, sizes, *, activation, interpret=False):
    product = functools.partial(_product, place=place.reshape(x.shape[0], -1), sizes=sizes, interpret=interpret)
    inner = product(x, _quantized(up), up.shape[1] // down.shape[2], activation)
    return product(inner, _quantized(down), 1, None)


def _product(x, weight, gates, activation, *, place, sizes, interpret):
    """Returns [tokens, chosen, outputs], of x [tokens, inputs] or [tokens, chosen, inputs]."""
    experts, outputs, inputs = weight.shape
    outputs //= gates
    block = power_of_two_in(outputs, OUTPUTS)
    scales = jax.tree.map(
        lambda v: v.reshape(*v.shape[:-1], gates, outputs), (weight.channel_scale, weight.group_scale)
    )
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation, block=block, piece=_piece(weight)),
        grid=(place.size, outputs // block),
        out_shape=jax.ShapeDtypeStruct((*place.shape, outputs), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="expert_mlp",
    )(x, weight.values.reshape(experts, gates, outputs, inputs), place, sizes, *scales)


def _quantized(weight):
    """Returns the weight, with no scales if it is an array."""
    return weight if isinstance(weight, Quantized) else Quantized(weight)


def _piece(weight):
    """Returns the number of inputs of a piece, whose scales are the same."""
    return power_of_two_in(weight.group, INPUTS)


def _kernel(x, weight, place, sizes, channel, scale, out, *, activation, block, piece):
    row, first = pl.program_id(0), pl.program_id(1) * block
    (tokens, chosen), (experts, gates, _, inputs) = place.shape, weight.shape
    expert = jnp.arange(pl.next_power_of_2(experts), dtype=I32)
    size = plt.load(sizes.at[expert], mask=expert < experts, other=I32(0))
    before = lax.cumsum(size, axis=0) <= row  # experts whose rows all come before this one
    number = jnp.sum(((expert < experts) & before).astype(I32), axis=0)
    real = number < experts
    # A row of no expert is on its own: its result is that of a sum of nothing.
    start = jnp.where(real, jnp.sum(jnp.where(before, size, I32(0)), axis=0), row)
    count = jnp.where(real, jnp.sum(jnp.where(expert == number, size, I32(0)), axis=0), I32(1))
    leads = row == start

    token = jnp.arange(max(LEAST, pl.next_power_of_2(tokens)), dtype=I32)
    nth = jnp.arange(pl.next_power_of_2(chosen), dtype=I32)
    pair = (token < tokens)[:, None] & (nth < chosen)[None, :]
    at = plt.load(place.at[token[:, None], nth[None, :]], mask=pair, other=I32(-1))
    mine = (at >= start) & (at < start + count) & leads
    has = jnp.max(mine.astype(I32), axis=1) > 0
    which = jnp.sum(jnp.where(mine, nth[None, :], I32(0)), axis=1)

    output, column = first + jnp.arange(block, dtype=I32), jnp.arange(piece, dtype=I32)
    safe = jnp.minimum(number, experts - 1)

    def add(k, sums):
        here = k * piece + column
        index = (token[:, None],) if len(x.shape) == 2 else (token[:, None], which[:, None])
        values = plt.load(x.at[(*index, here[None, :])], mask=has[:, None], other=jnp.zeros((), x.dtype))
        return tuple(total + part(gate, k, here, values) for gate, total in enumerate(sums))

    def part(gate, k, here, values):
        narrow = plt.load(weight.at[safe, I32(gate), output[:, None], here[None, :]])
        product = dot(values, narrow.astype(x.dtype).T, x.dtype)
        if scale is not None:
            group = lax.div(k * piece, I32(inputs // scale.shape[1]))
            product *= plt.load(scale.at[safe, group, I32(gate), output]).astype(F32)[None, :]
        return product

    steps = jnp.where(real & leads, I32(inputs // piece), I32(0))
    start_sums = (jnp.zeros((token.shape[0], block), F32),) * gates
    sums = lax.fori_loop(I32(0), steps, add, start_sums)
    if channel is not None:
        factors = (plt.load(channel.at[safe, I32(gate), output]).astype(F32)[None, :] for gate in range(gates))
        sums = [total * factor for total, factor in zip(sums, factors, strict=True)]
    *gate, total = (v.astype(x.dtype) for v in sums)
    if activation is not None:
        total = activation(gate[0].astype(F32)).astype(x.dtype) * total if gate else activation(total.astype(F32))
    index = (token[:, None], which[:, None], output[None, :])
    plt.store(out.at[index], total.astype(x.dtype), mask=jnp.broadcast_to(has[:, None], total.shape))
