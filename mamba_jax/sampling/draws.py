"""Random numbers that depend only on (seed, choice, output position).

Therefore a request with a seed draws the same numbers in any batch, after a preemption, and with any chunk size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from kernels_pallas.fixed_order import row_sum

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
    blocks = in_blocks(weights)

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


def in_blocks(weights: Float[Array, "*rows vocab"]) -> Float[Array, "*rows blocks width"]:
    """Divides the vocabulary into blocks. The last block is padded with zeros."""
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -weights.shape[-1] % BLOCK)]
    return jnp.pad(weights, padding).reshape(*weights.shape[:-1], -1, BLOCK)


def _invert(weights: Float[Array, "rows H n"], number: Float[Array, "rows H"]) -> Int[Array, "rows H"]:
    """Returns the index at which the cumulative weights pass a fraction of their sum. It has a weight above 0."""
    below = jnp.cumsum(weights, axis=-1)
    index = (below <= number[..., None] * below[..., -1:]).sum(axis=-1, dtype=jnp.int32)
    # If the product is rounded up to the whole sum, use the last index that has a weight.
    last = jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[-1], dtype=jnp.int32), 0), axis=-1)
    return jnp.minimum(index, last)
