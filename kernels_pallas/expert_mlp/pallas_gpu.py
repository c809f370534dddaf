"""The MLPs of experts as two Triton kernels, for the few tokens of a decode step.

A program of either kernel computes a block of outputs of one expert, for all of its tokens: it reads each weight once.
Its product has a row for each token of the step, so tokens need not be sorted, and the first kernel takes them as they
are. Programs of rows that are not the first of their expert end at once. Both write a row for each token and each of
its experts, so that what follows (the sum by token) reads no places.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.expert_mlp import xla
from kernels_pallas.heads import power_of_two_in
from kernels_pallas.quantised import Quantised
from kernels_pallas.triton_blocks import LEAST, dot, offsets_overflow

F32, I32 = jnp.float32, jnp.int32
MOST = 32  # tokens; an expert's product computes all of them
OUTPUTS, INPUTS, STAGES = 64, 128, 4


def unsupported(x, up, down, order, place, sizes, *, activation):
    """Returns why this call cannot run, or None."""
    if isinstance(up, Quantised) or isinstance(down, Quantised):
        return "weights are quantised"
    if 0 in (*x.shape, *up.shape, *order.shape):
        return "it is empty"
    if x.shape[0] > MOST:
        return f"{x.shape[0]} tokens, more than {MOST}"
    if not x.dtype == up.dtype == down.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it multiplies {x.dtype} by {up.dtype} and {down.dtype}"
    if any(size % LEAST for size in down.shape[1:]):
        return f"weights are {down.shape[1]} x {down.shape[2]}, not multiples of {LEAST}"
    if offsets_overflow(up) or offsets_overflow(down):
        return "the weights have too many elements for 32-bit offsets"
    return None


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def expert_mlp(x, up, down, order, place, sizes, *, activation, interpret=False):
    """See `api.expert_mlp`."""
    return _multiply(x, up, down, order, place, sizes, activation, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _multiply(x, up, down, order, place, sizes, activation, interpret):
    product = functools.partial(_product, place=place.reshape(x.shape[0], -1), sizes=sizes, interpret=interpret)
    by_gate = up.reshape(up.shape[0], -1, down.shape[2], up.shape[2])
    return product(product(x, by_gate, activation), down[:, None], None)


def _product(x, weight, activation, *, place, sizes, interpret):
    """Returns [tokens, chosen, outputs], of x [tokens, inputs] or [tokens, chosen, inputs]."""
    outputs, inputs = weight.shape[2:]
    block = power_of_two_in(outputs, OUTPUTS)
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation, block=block, piece=power_of_two_in(inputs, INPUTS)),
        grid=(place.size, outputs // block),
        out_shape=jax.ShapeDtypeStruct((*place.shape, outputs), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="expert_mlp",
    )(x, weight, place, sizes)


def _forward(x, up, down, order, place, sizes, activation, interpret):
    return _multiply(x, up, down, order, place, sizes, activation, interpret), (x, up, down, order, place, sizes)


def _backward(activation, interpret, saved, change):
    x, up, down, *rows = saved
    _, pull = jax.vjp(lambda *v: xla.expert_mlp(*v, *rows, activation=activation), x, up, down)
    return (*pull(change), None, None, None)


_multiply.defvjp(_forward, _backward)


def _block(n):
    return 1 << (n - 1).bit_length()


def _kernel(x, weight, place, sizes, out, *, activation, block, piece):
    row, first = pl.program_id(0), pl.program_id(1) * block
    (tokens, chosen), (experts, gates, _, inputs) = place.shape, weight.shape
    expert = jnp.arange(_block(experts), dtype=I32)
    size = plt.load(sizes.at[expert], mask=expert < experts, other=I32(0))
    before = lax.cumsum(size, axis=0) <= row  # experts whose rows all come before this one
    number = jnp.sum(((expert < experts) & before).astype(I32), axis=0)
    real = number < experts
    # A row of no expert is on its own: its result is that of a sum of nothing.
    start = jnp.where(real, jnp.sum(jnp.where(before, size, I32(0)), axis=0), row)
    count = jnp.where(real, jnp.sum(jnp.where(expert == number, size, I32(0)), axis=0), I32(1))
    leads = row == start

    token, nth = jnp.arange(max(LEAST, _block(tokens)), dtype=I32), jnp.arange(_block(chosen), dtype=I32)
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
        return tuple(
            total + dot(values, plt.load(weight.at[safe, I32(gate), output[:, None], here[None, :]]).T, x.dtype)
            for gate, total in enumerate(sums)
        )

    steps = jnp.where(real & leads, I32(inputs // piece), I32(0))
    start_sums = (jnp.zeros((token.shape[0], block), F32),) * gates
    *gate, total = (v.astype(x.dtype) for v in lax.fori_loop(I32(0), steps, add, start_sums))
    if activation is not None:
        total = activation(gate[0].astype(F32)).astype(x.dtype) * total if gate else activation(total.astype(F32))
    index = (token[:, None], which[:, None], output[None, :])
    plt.store(out.at[index], total.astype(x.dtype), mask=jnp.broadcast_to(has[:, None], total.shape))
