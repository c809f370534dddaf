"""Random numbers that depend on nothing but (seed, choice, output position, purpose).

So a seeded request draws the same numbers whatever its batch-mates, preemption, or how its prompt was cut.
"""

import enum

import jax
from jaxtyping import Array, Float, Int, UInt


class Purpose(enum.IntEnum):
    """What a draw is for. Two purposes at one position are independent of each other."""

    TOKEN = 0


def _keys(key: UInt[Array, "rows 2"], position: Int[Array, "rows H"], purpose: Purpose) -> Array:
    def one(key: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position * len(Purpose) + purpose)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(key, position)


def gumbel(key: UInt[Array, "rows 2"], position: Int[Array, "rows H"], size: int) -> Float[Array, "rows H size"]:
    """Standard Gumbel noise: the argmax of logits plus it is a draw from their softmax.

    `key` is that of the row's seed and choice (see `SamplingTable`), `position` counts output tokens.
    """
    keys = _keys(key, position, Purpose.TOKEN)
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(keys)
