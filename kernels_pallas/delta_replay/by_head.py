"""Decays of a replay where a head has one: weights of pairs of tokens, on products that the heads of a group share.

With s the running sum of log decays since the anchor, what token t finds of any key is

    exp(s[t]) S(a) key + sum over n < t of exp(s[t] - s[n]) (k[n] key) u[n]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import tails

F32 = jnp.float32
dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class ByHead:
    """The decays since the anchors."""

    order: tails.Order
    sums: Array
    """[rows, entries, heads]: of log decays, from the anchor up to and with each token."""
    now: Array
    """[rows, steps, heads]: the same of new tokens."""

    @classmethod
    def of(cls, kept: Array, new: Array, order: tails.Order) -> ByHead:
        """From log decays since the anchor, [rows, entries, heads]; those of new tokens are among them."""
        sums = jnp.cumsum(kept, axis=1)
        return cls(order, sums, tails.at(sums, order.index_of_new))

    def of_old(self, read: Callable[[Array], Array], asked: Array, keys: Array, u: Array) -> Array:
        """What new tokens find of all before them, [rows, 2 * steps, heads, head_dim].

        `read` asks the anchors; `asked` are k and then q of new tokens, [rows, 2 * steps, groups, state]; keys and u
        are those of all tokens, u zeros where they are new.
        """
        # Masked before exp: of what comes later it could overflow.
        old = self.order.is_old[:, None, :, None]
        since = jnp.exp(jnp.where(old, self.now[:, :, None] - self.sums[:, None], -jnp.inf))
        scores = twice(since) * _each_head(dot("rtgs,rngs->rtng", asked, keys), u.shape[2])
        return read(asked) * jnp.exp(twice(self.now))[..., None] + dot("rtnh,rnhp->rthp", scores, u)

    def of_new(self, asked: Array, k: Array) -> Array:
        """What new tokens find of each other's keys, [rows, 2 * steps, steps, heads]; any value of later ones."""
        between = jnp.exp(jnp.minimum(self.now[:, :, None] - self.now[:, None], 0))
        return twice(between) * _each_head(dot("rtgs,rngs->rtng", asked, k), self.now.shape[2])

    def until(self, position: Array, keys: Array, u: Array) -> tuple[Array, Array, Array]:
        """What is left at each row's position: of the anchor [rows, heads]; of tokens before it, their keys and u."""
        index = position - self.order.position[:, 0] - 1
        there = tails.at(self.sums, index[:, None])[:, 0]
        before = (self.order.position < position[:, None])[..., None]
        left = jnp.exp(jnp.where(before, there[:, None] - self.sums, -jnp.inf))
        return jnp.exp(there), keys, u * left[..., None]


def twice(of_steps: Array) -> Array:
    """The same for the k and the q of each step."""
    return jnp.concatenate([of_steps, of_steps], axis=1)


def _each_head(scores: Array, heads: int) -> Array:
    """[..., groups] as [..., heads]."""
    return jnp.repeat(scores, heads // scores.shape[-1], axis=-1)
