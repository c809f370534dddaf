"""Random numbers that depend on nothing but (seed, choice, output position, purpose).

So a seeded request draws the same numbers whatever its batch-mates, preemption, or how its prompt was cut.
"""

import enum

import jax
from jaxtyping import Array, Float, Int, UInt


class Purpose(enum.IntEnum):
    """What a draw is for. Two purposes at one position are independent of each other."""

    TOKEN = 0
    ACCEPT_DRAFT = 1


def _keys(seed: UInt[Array, "rows 2"], choice: Int[Array, " rows"], position: Int[Array, "rows H"], purpose: Purpose):
    def key(seed, choice, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, choice), position), int(purpose))

    return jax.vmap(jax.vmap(key, in_axes=(None, None, 0)))(seed, choice, position)


def gumbel(
    seed: UInt[Array, "rows 2"], choice: Int[Array, " rows"], position: Int[Array, "rows H"], size: int
) -> Float[Array, "rows H size"]:
    """Standard Gumbel noise: the argmax of logits plus it is a draw from their softmax."""
    keys = _keys(seed, choice, position, Purpose.TOKEN)
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (size,))))(keys)


def uniform(
    seed: UInt[Array, "rows 2"], choice: Int[Array, " rows"], position: Int[Array, "rows H"]
) -> Float[Array, "rows H"]:
    """In [0, 1), to accept a draft by."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys(seed, choice, position, Purpose.ACCEPT_DRAFT))
