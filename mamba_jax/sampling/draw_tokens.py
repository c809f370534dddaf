"""Drawing tokens within the limits of top-k, top-p and min-p, by few passes over the vocabulary.

The largest logits of a head almost always tell where its limits are. `_by_cut` takes the limits from them, and checks
with the weights of the whole vocabulary that `truncate` has the same ones. Heads for which this fails, for example with
more likely tokens than `FEW`, go through `truncate` itself, a group of them at a time.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.sampling.draws import BLOCK, categorical, draw_by_blocks, in_blocks
from mamba_jax.sampling.inputs import SamplingInputs
from mamba_jax.sampling.largest import most_likely
from mamba_jax.sampling.logits import limits_of, truncate, weights_of
from mamba_jax.sampling.table import SamplingTable

FEW = 256
"""Logits of a head that are sorted to find its limits."""
GROUP = 16
"""Heads that go through `truncate` at a time, of those that the largest logits do not decide."""
FEW_HEADS = 8
"""Heads whose logits and weights fit in the memory of a TPU's chip, as many as its tiles have rows."""

Heads = Float[Array, "n vocab"]


def draw(logits: Heads, asked: SamplingInputs) -> Int[Array, " n"]:
    """Draws a token for each head of each row. Those of greedy rows have no meaning.

    Args:
        logits: float32, after masks, biases and penalties.
    """
    return lax.platform_dependent(
        logits, tpu=lambda logits: draw_in_turn(logits, asked), default=lambda logits: draw_by_cut(logits, asked)
    )


def draw_in_turn(logits: Heads, asked: SamplingInputs) -> Int[Array, " n"]:
    """Draws by `truncate`, a few heads after the other. On a TPU their logits stay on the chip for all passes."""
    seat, index = _of_heads(asked)
    group = math.gcd(logits.shape[0], FEW_HEADS)

    def search(i: Array) -> Array:
        some, seats, places = (lax.dynamic_slice_in_dim(x, i * group, group) for x in (logits, seat, index))
        # Copied once: every pass would read its slice from the large memory.
        return _by_search(lax.optimization_barrier(some), asked.table.take(seats), places)

    return lax.map(search, jnp.arange(logits.shape[0] // group)).reshape(-1)


def draw_by_cut(logits: Heads, asked: SamplingInputs) -> Int[Array, " n"]:
    """Draws by few passes over the vocabulary, where the largest logits tell the limits, else by `truncate`."""
    count, (seat, index) = logits.shape[0], _of_heads(asked)
    tokens, decided = _by_cut(logits, asked.table.take(seat), index)
    searched = jnp.repeat(asked.random, count // asked.random.shape[0]) & ~decided
    group = min(count, GROUP)
    # Heads that are searched come first. The last group is filled up with any.
    order = jnp.pad(jnp.argsort(~searched, stable=True), (0, -count % group))

    def search(i: Array, tokens: Array) -> Array:
        some = lax.dynamic_slice_in_dim(order, i * group, group)
        return tokens.at[some].set(_by_search(logits[some], asked.table.take(seat[some]), index[some]))

    return lax.fori_loop(0, -(-searched.sum(dtype=jnp.int32) // group), search, tokens)


def _of_heads(asked: SamplingInputs) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """The seat of each head, and where its token comes in the row's output."""
    return jnp.repeat(asked.row_id, asked.index.shape[1]), asked.index.reshape(-1)


def _by_search(logits: Heads, table: SamplingTable, index: Int[Array, " n"]) -> Int[Array, " n"]:
    weights = truncate(weights_of(logits[:, None], table.temperature), table)
    return categorical(table.key, index[:, None], weights)[:, 0]


def _by_cut(logits: Heads, table: SamplingTable, index: Int[Array, " n"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Draws tokens. Returns also whether the limits are certain to be those of `truncate`."""
    min_p, top_k, top_p = limits_of(table)
    temperature = jnp.where(table.temperature > 0, table.temperature, 1.0)[:, None]
    few, _ = most_likely(logits, min(FEW, logits.shape[-1]))

    def weights_from(limit: Float[Array, "n 1"], logits: Array, largest: Array) -> Array:
        return jnp.where(logits < limit, 0.0, jnp.exp(logits / temperature - largest / temperature))

    # Limits are logits: each part of the program reads the same ones, where it may round weights otherwise. If the last
    # of the few is kept by a limit, others may be, too.
    weight = weights_from(jnp.full_like(temperature, -jnp.inf), few, few[:, :1])

    def least(kept: Bool[Array, "n few"]) -> Float[Array, "n 1"]:
        return jnp.min(jnp.where(kept, few, jnp.inf), axis=-1, keepdims=True)

    nth = jnp.take_along_axis(weight, jnp.clip(top_k - 1, 0, few.shape[-1] - 1), axis=-1)
    by_k = (top_k > 0) & (nth > 0)
    by_min_p_or_k = jnp.maximum(min_p, jnp.where(by_k, nth, 0.0))
    decided = (top_k <= few.shape[-1]) & ((by_min_p_or_k == 0) | (weight[:, -1:] < by_min_p_or_k))
    limit = jnp.where(by_min_p_or_k > 0, least(weight >= by_min_p_or_k), -jnp.inf)

    total = in_blocks(weights_from(limit, logits, few[:, :1])).sum(axis=(-2, -1))[:, None]
    # At least the most likely token stays, however small top_p is.
    wanted = jnp.maximum(top_p * total, jnp.finfo(logits.dtype).tiny)
    reached = jnp.cumsum(jnp.where(few < limit, 0.0, weight), axis=-1) >= wanted
    pth = jnp.take_along_axis(weight, jnp.argmax(reached, axis=-1, keepdims=True), axis=-1)
    by_p = top_p < 1
    limit, above = jnp.where(by_p, least(weight >= pth), limit), least(weight > pth)
    # The same number, but known only after the pass before: XLA would keep its weights in memory for this one.
    highest = jnp.where(total >= 0, few[:, :1], jnp.nan)
    sums, sums_above = _sums(*(in_blocks(weights_from(each, logits, highest)) for each in (limit, above)))
    proved = (
        (weight[:, -1:] < pth) & (sums.sum(-1, keepdims=True) >= wanted) & (sums_above.sum(-1, keepdims=True) < wanted)
    )

    def within(block: Int[Array, "n 1"]) -> Float[Array, "n 1 width"]:
        place = block * BLOCK + jnp.arange(BLOCK)
        part = jnp.take_along_axis(logits, jnp.minimum(place, logits.shape[-1] - 1), axis=-1)
        return jnp.where(place < logits.shape[-1], weights_from(limit, part, highest), 0.0)[:, None]

    tokens = draw_by_blocks(table.key, index[:, None], sums[:, None], within)
    return tokens[:, 0], (decided & (~by_p | proved))[:, 0]


def _sums(*blocks: Float[Array, "n blocks width"]) -> tuple[Float[Array, "n blocks"], ...]:
    """The sums of the blocks of each array, as one operation: XLA:GPU then reads the logits once for all."""
    zeros = tuple(jnp.zeros((), each.dtype) for each in blocks)
    return tuple(lax.reduce(blocks, zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)), (2,)))
