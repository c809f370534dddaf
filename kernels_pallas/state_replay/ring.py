"""Which tokens lie where in a tail, and which state is due."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class Order:
    """The tokens since the anchor in their order; entry i of a tail holds those whose position is i modulo entries."""

    position: Int[Array, "rows entries"]
    """The anchor's length, and so on."""
    valid: Bool[Array, "rows entries"]
    """Whether there is a token of that position, the new ones included."""
    new_position: Int[Array, "rows steps"]
    is_new: Bool[Array, "rows steps"]
    """Whether a new token is no padding."""
    index_of_new: Int[Array, "rows steps"]
    """Where new tokens are in the order."""
    seen: Bool[Array, "rows steps entries"]
    """Whether a new token comes after that one, or is it."""

    @classmethod
    def of(cls, anchor_length, length, num_tokens, *, entries: int, steps: int) -> Order:
        count, step = jnp.arange(entries), jnp.arange(steps)
        position = anchor_length[:, None] + count
        new_position = length[:, None] + step
        valid = (position < (length + num_tokens)[:, None]) & (num_tokens > 0)[:, None]
        index_of_new = new_position - anchor_length[:, None]
        return cls(
            position,
            valid,
            new_position,
            step < num_tokens[:, None],
            index_of_new,
            valid[:, None] & (count <= index_of_new[..., None]),
        )


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The next multiple of the interval after each row's length."""

    position: Int[Array, " rows"]
    reached: Bool[Array, " rows"]


def next_boundary(length, num_tokens, interval: int) -> Boundary:
    """Where it is, and whether the new tokens reach it."""
    position = (length // interval + 1) * interval
    return Boundary(position, position <= length + num_tokens)
