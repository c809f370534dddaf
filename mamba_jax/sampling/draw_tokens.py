"""Draws tokens within the limits of top-k, top-p and min-p, with few passes over the vocabulary.

The largest logits of a head almost always determine its limits. `_by_cut` takes the limits from them, and checks with
the weights of the whole vocabulary that `truncate` would choose the same limits. If this fails for a head, for example
because more than `FEW` tokens are within the limits, `truncate` computes the limits of this head.

Random numbers depend only on (seed, choice, output position). Therefore a request with a seed draws the same numbers in
any batch, after a preemption, and with any chunk size.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8

from kernels_pallas.fixed_order import cumulative_sum, exp, is_fixed, quotient, row_sum
from mamba_jax.sampling.largest import in_blocks, most_likely
from mamba_jax.sampling.logits import SamplingInputs, limits_of, truncate, weights_of
from mamba_jax.sampling.masks import pack_bits

FEW = 256
"""Number of largest logits of a head that are sorted to find its limits."""
GROUP = 16
"""Number of heads that `truncate` processes at a time if the largest logits do not determine their limits."""
FEW_HEADS = 8
"""Number of heads whose logits and weights fit in a TPU's VMEM: the number of rows of a tile."""

Heads = Float[Array, "n vocab"]
Supports = UInt8[Array, "n bytes"]
"""Sets of tokens, as `pack_bits` packs them; no bytes if `SamplingInputs.supports` is None."""


def draw(logits: Heads, asked: SamplingInputs) -> tuple[Int[Array, " n"], Supports]:
    """Draws a token for each head of each row. Ignore the tokens of greedy rows.

    Args:
        logits: float32, after masks, biases and penalties.

    Returns:
        the tokens, and the tokens that each could have been, of rows that ask for them.
    """
    return lax.platform_dependent(
        logits, tpu=lambda logits: draw_in_turn(logits, asked), default=lambda logits: draw_by_cut(logits, asked)
    )


def draw_in_turn(logits: Heads, asked: SamplingInputs) -> tuple[Int[Array, " n"], Supports]:
    """Draws by `truncate`, a few heads at a time. On a TPU, their logits stay on the chip for all passes."""
    seat, index = _of_heads(asked)
    group = math.gcd(logits.shape[0], FEW_HEADS)

    def search(i: Array) -> tuple[Array, Array]:
        some, seats, places = (lax.dynamic_slice_in_dim(x, i * group, group) for x in (logits, seat, index))
        # Copy the slice once. Otherwise every pass reads it from HBM.
        return _by_search(lax.optimization_barrier(some), asked, seats, places)

    tokens, supports = lax.map(search, jnp.arange(logits.shape[0] // group))
    return tokens.reshape(-1), supports.reshape(logits.shape[0], -1)


def draw_by_cut(logits: Heads, asked: SamplingInputs) -> tuple[Int[Array, " n"], Supports]:
    """Draws with few passes over the vocabulary if the largest logits determine the limits, else by `truncate`."""
    count, (seat, index) = logits.shape[0], _of_heads(asked)
    tokens, supports, decided = _by_cut(logits, asked, seat, index)
    searched = jnp.repeat(asked.random, count // asked.random.shape[0]) & ~decided
    group = min(count, GROUP)
    # The heads to search come first. Other heads fill up the last group.
    order = jnp.pad(jnp.argsort(~searched, stable=True), (0, -count % group))

    def search(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        some = lax.dynamic_slice_in_dim(order, i * group, group)
        drawn = _by_search(logits[some], asked, seat[some], index[some])
        return found[0].at[some].set(drawn[0]), found[1].at[some].set(drawn[1])

    return lax.fori_loop(0, -(-searched.sum(dtype=jnp.int32) // group), search, (tokens, supports))


def supports_where(asked: SamplingInputs, drawable: Callable[[], Bool[Array, "n vocab"]], shape: Any) -> Supports:
    """Returns the sets of drawable tokens if some row asks for them. `shape`: that of the logits."""
    if asked.supports is None:
        return jnp.zeros((shape[0], 0), jnp.uint8)
    nothing = jnp.zeros((shape[0], -(-shape[1] // 8)), jnp.uint8)
    return lax.cond(asked.supports.any(), lambda: pack_bits(drawable()), lambda: nothing)


def _of_heads(asked: SamplingInputs) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Returns the seat of each head, and the index of its token in the row's output."""
    return jnp.repeat(asked.row_id, asked.index.shape[1]), asked.index.reshape(-1)


def _by_search(
    logits: Heads, asked: SamplingInputs, seat: Int[Array, " n"], index: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Supports]:
    table = asked.table.take(seat)
    weights = truncate(weights_of(logits[:, None], table.temperature), table)
    tokens = categorical(table.key, index[:, None], weights)[:, 0]
    return tokens, supports_where(asked, lambda: weights[:, 0] > 0, logits.shape)


def _by_cut(
    logits: Heads, asked: SamplingInputs, seat: Int[Array, " n"], index: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Supports, Bool[Array, " n"]]:
    """Returns tokens, those that each could have been, and whether the limits are known to be those of `truncate`."""
    table = asked.table.take(seat)
    min_p, top_k, top_p = limits_of(table)
    temperature = jnp.where(table.temperature > 0, table.temperature, 1.0)[:, None]
    few, _ = most_likely(logits, min(FEW, logits.shape[-1]))

    def weights_from(limit: Float[Array, "n 1"], logits: Array, largest: Array) -> Array:
        return jnp.where(logits < limit, 0.0, exp(quotient(logits, temperature) - quotient(largest, temperature)))

    # Compare logits with the limits, not weights: XLA may round a weight differently in each fusion that computes it.
    # If a limit keeps the last of the few tokens, it may keep tokens outside of the few, too.
    weight = weights_from(jnp.full_like(temperature, -jnp.inf), few, few[:, :1])

    def least(kept: Bool[Array, "n few"]) -> Float[Array, "n 1"]:
        return jnp.min(jnp.where(kept, few, jnp.inf), axis=-1, keepdims=True)

    nth = jnp.take_along_axis(weight, jnp.clip(top_k - 1, 0, few.shape[-1] - 1), axis=-1)
    by_k = (top_k > 0) & (nth > 0)
    by_min_p_or_k = jnp.maximum(min_p, jnp.where(by_k, nth, 0.0))
    decided = (top_k <= few.shape[-1]) & ((by_min_p_or_k == 0) | (weight[:, -1:] < by_min_p_or_k))
    limit = jnp.where(by_min_p_or_k > 0, least(weight >= by_min_p_or_k), -jnp.inf)

    total = _total(in_blocks(weights_from(limit, logits, few[:, :1]), BLOCK))
    # At least the most likely token stays, however small top_p is.
    wanted = jnp.maximum(top_p * total, jnp.finfo(logits.dtype).tiny)
    reached = cumulative_sum(jnp.where(few < limit, 0.0, weight)) >= wanted
    pth = jnp.take_along_axis(weight, jnp.argmax(reached, axis=-1, keepdims=True), axis=-1)
    by_p = top_p < 1
    limit, above = jnp.where(by_p, least(weight >= pth), limit), least(weight > pth)
    # The same value, made to depend on the previous pass. Otherwise XLA stores that pass's weights for this one.
    highest = jnp.where(total >= 0, few[:, :1], jnp.nan)
    sums, sums_above = _sums(*(in_blocks(weights_from(each, logits, highest), BLOCK) for each in (limit, above)))
    proved = (weight[:, -1:] < pth) & (row_sum(sums) >= wanted) & (row_sum(sums_above) < wanted)

    def within(block: Int[Array, "n 1"]) -> Float[Array, "n 1 width"]:
        place = block * BLOCK + jnp.arange(BLOCK)
        part = jnp.take_along_axis(logits, jnp.minimum(place, logits.shape[-1] - 1), axis=-1)
        return jnp.where(place < logits.shape[-1], weights_from(limit, part, highest), 0.0)[:, None]

    tokens = draw_by_blocks(table.key, index[:, None], sums[:, None], within)
    supports = supports_where(asked, lambda: weights_from(limit, logits, highest) > 0, logits.shape)
    return tokens[:, 0], supports, (decided & (~by_p | proved))[:, 0]


def _total(blocks: Float[Array, "n blocks width"]) -> Float[Array, "n 1"]:
    if is_fixed():
        return row_sum(blocks.reshape(blocks.shape[0], -1))
    return blocks.sum(axis=(-2, -1))[:, None]


def _sums(*blocks: Float[Array, "n blocks width"]) -> tuple[Float[Array, "n blocks"], ...]:
    """Returns the sums of the blocks of each array, by one operation, so that XLA:GPU reads the logits once."""
    if is_fixed():
        return tuple(row_sum(each)[..., 0] for each in blocks)
    zeros = tuple(jnp.zeros((), each.dtype) for each in blocks)
    return tuple(lax.reduce(blocks, zeros, lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True)), (2,)))


BLOCK = 128


def _keys(key: UInt[Array, "rows 2"], position: Int[Array, "rows H"]) -> Array:
    def one(key: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(key, position)


def categorical(
    key: UInt[Array, "rows 2"], position: Int[Array, "rows H"], weights: Float[Array, "rows H vocab"]
) -> Int[Array, "rows H"]:
    """Draws one token for each head, with probabilities proportional to the weights.

    Two uniform numbers are drawn: the first chooses a block of tokens, the second a token of the block. This needs one
    pass over the vocabulary, while Gumbel noise needs a random number for every token. A token of weight 0 is never
    drawn.

    Args:
        key: the key of the row's seed and choice (see `SamplingTable`).
        position: index of the token in the output.
        weights: not negative.
    """
    blocks = in_blocks(weights, BLOCK)

    def within(block: Int[Array, "rows H"]) -> Float[Array, "rows H width"]:
        return jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]

    return draw_by_blocks(key, position, row_sum(blocks)[..., 0], within)


def draw_by_blocks(
    key: UInt[Array, "rows 2"],
    position: Int[Array, "rows H"],
    sums: Float[Array, "rows H blocks"],
    within: Callable[[Int[Array, "rows H"]], Float[Array, "rows H width"]],
) -> Int[Array, "rows H"]:
    """Draws as `categorical` does, given the weight of each block and a function that returns a block's weights."""
    keys = _keys(key, position)
    numbers = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (2,))))(keys)
    block = _invert(sums, numbers[..., 0])
    return block * BLOCK + _invert(within(block), numbers[..., 1])


def _invert(weights: Float[Array, "rows H n"], number: Float[Array, "rows H"]) -> Int[Array, "rows H"]:
    """Returns the index at which the cumulative weights pass a fraction of their sum. It has a weight above 0."""
    below = cumulative_sum(weights)
    index = (below <= number[..., None] * below[..., -1:]).sum(axis=-1, dtype=jnp.int32)
    # If the product is rounded up to the whole sum, use the last index that has a weight.
    last = jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[-1], dtype=jnp.int32), 0), axis=-1)
    return jnp.minimum(index, last)
