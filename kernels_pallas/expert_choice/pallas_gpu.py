"""The choice of experts as one Triton program, for the few tokens of a decode step.

In plain JAX it is eight kernels: a sort of each token's scores, weights, a sort of rows, its inverse, and counts. Here
each token's experts are found one after the other. A token has an expert at most once, so a row's place follows from
the number of rows before its expert and the number of tokens before its own with the same expert.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.expert_choice.rule import Choice
from kernels_pallas.fixed_order import ordered

F32, I32 = jnp.float32, jnp.int32
MOST = 1 << 13  # scores, in the registers of one program
SCORES_OF_WARP = 256
MOST_MASKS = 12 * MOST  # of chosen experts; with more of them, registers spill
LEAST_KEY = -(1 << 31)


def unsupported(scores, bias, valid, first, *, own, rule):
    tokens, experts = scores.shape
    size = pl.next_power_of_2(tokens) * pl.next_power_of_2(experts)
    if size > MOST:
        return f"{tokens} x {experts} scores, more than {MOST}"
    if rule.count * size > MOST_MASKS:
        return f"{rule.count} of {experts} experts for {tokens} tokens, which do not fit into registers"
    if rule.num_groups != rule.top_groups:
        return "experts come from some of several groups"
    return None


@functools.partial(jax.jit, static_argnames=("own", "rule", "interpret"))
def choose_experts(scores, bias, valid, first, *, own, rule, interpret=False):
    tokens, experts = scores.shape
    rows = tokens * rule.count
    first = jnp.asarray(first, I32).reshape(1) if own < experts else None
    sizes = (pl.next_power_of_2(tokens), pl.next_power_of_2(experts))
    of_rows = [jax.ShapeDtypeStruct((rows,), I32)] * 2
    of_tokens = [jax.ShapeDtypeStruct((tokens, rule.count), dtype) for dtype in (F32, I32)]
    return Choice(
        *pl.pallas_call(
            functools.partial(_kernel, sizes=sizes, rule=rule),
            grid=(1,),
            out_shape=[*of_tokens, *of_rows, jax.ShapeDtypeStruct((own,), I32)],
            compiler_params=plt.CompilerParams(
                num_warps=min(16, max(4, sizes[0] * sizes[1] // SCORES_OF_WARP)), num_stages=1
            ),
            interpret=interpret,
            name="expert_choice",
        )(scores, valid.astype(I32), first, bias)
    )


def _kernel(scores, valid, first, bias, weights, chosen, order, place, counts, *, sizes, rule):
    (tokens, experts), (rows, width) = scores.shape, sizes
    token, expert = jnp.arange(rows, dtype=I32), jnp.arange(width, dtype=I32)
    there, known = token < tokens, expert < experts
    value = plt.load(scores.at[token[:, None], expert[None, :]], mask=there[:, None] & known[None, :], other=F32(0))
    biased_value = value
    if bias is not None:
        biased_value = value + plt.load(bias.at[expert], mask=known, other=F32(0))[None, :]
    key = ordered(lax.bitcast_convert_type(biased_value, I32))  # the order of `lax.top_k`
    real = (plt.load(valid.at[token], mask=there, other=I32(0)) != 0) & there
    begin = I32(0) if first is None else plt.load(first.at[I32(0)])
    own = counts.shape[0]
    mine = (expert >= begin) & (expert < begin + own)

    free = jnp.broadcast_to(known[None, :], (rows, width))
    indices, values = [], []
    for _ in range(rule.count):
        best = jnp.max(jnp.where(free, key, I32(LEAST_KEY)), axis=1)
        # The first of equal ones, as `lax.top_k`.
        index = jnp.min(jnp.where(free & (key == best[:, None]), expert[None, :], I32(width)), axis=1)
        here = expert[None, :] == index[:, None]
        free = free & ~here
        indices.append(index)
        values.append(jnp.sum(jnp.where(here, value, F32(0)), axis=1))

    for n, (index, weight) in enumerate(zip(indices, _weights(values, rule), strict=True)):
        plt.store(weights.at[token, I32(n)], weight, mask=there)
        plt.store(chosen.at[token, I32(n)], index, mask=there)

    # 1 where a token goes through an expert of this device.
    goes = (~free & (known & mine)[None, :] & real[:, None]).astype(I32)
    of_expert = jnp.sum(goes, axis=0)
    plt.store(counts.at[jnp.where(mine, expert - begin, I32(own))], of_expert, mask=mine & known)
    before = (lax.cumsum(of_expert, axis=0) - of_expert)[None, :]
    if rows > 1:
        before = before + lax.cumsum(goes, axis=0) - goes
    of_token = jnp.sum(goes, axis=1)
    seen = lax.cumsum(of_token, axis=0) - of_token if rows > 1 else jnp.zeros(rows, I32)
    total = jnp.sum(of_token, axis=0)
    for n, index in enumerate(indices):
        here = expert[None, :] == index[:, None]
        goes_there = jnp.sum(jnp.where(here, goes, I32(0)), axis=1)
        number = token * rule.count + n
        # Rows of no expert of this device: after all others, in their order.
        at = jnp.where(goes_there > 0, jnp.sum(jnp.where(here, before, I32(0)), axis=1), total + number - seen)
        seen = seen + goes_there
        plt.store(place.at[jnp.where(there, number, I32(tokens * rule.count))], at, mask=there)
        plt.store(order.at[jnp.where(there, at, I32(tokens * rule.count))], number, mask=there)


def _weights(values, rule):
    if rule.weights == "softmax":
        values = [jnp.exp(value - values[0]) for value in values]
        total = functools.reduce(jnp.add, values)
        return [value / total for value in values]
    if rule.normalize:
        total = functools.reduce(jnp.add, values) + F32(1e-20)
        values = [value / total for value in values]
    return values if rule.scaling == 1.0 else [value * F32(rule.scaling) for value in values]
