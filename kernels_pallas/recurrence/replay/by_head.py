"""Decays of a replay with one decay per head: weights of pairs of tokens, on products that the heads of a group share.

With s the running sum of log decays since the anchor, the value that token t reads for any key is

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
    """[rows, steps, heads]: the sums of new tokens."""

    @classmethod
    def of(cls, kept: Array, new: Array, order: tails.Order) -> ByHead:
        """From log decays since the anchor, [rows, entries, heads]; those of new tokens are among them."""
        sums = jnp.cumsum(kept, axis=1)
        return cls(order, sums, tails.at(sums, order.index_of_new))

    def of_old(self, read: Callable[[Array], Array], asked: Array, keys: Array, u: Array) -> Array:
        """Returns what new tokens read from all tokens before them, [rows, n * steps, heads, head_dim].

        `read` reads the anchors; `asked` contains the queries of new tokens, or keys and then queries, [rows, n *
        steps, groups, state]; keys and u, what tokens added, are those of all tokens, with zeros as u of new ones.
        """
        # Masked before exp: for later tokens exp could overflow.
        old = self.order.is_old[:, None, :, None]
        since = jnp.exp(jnp.where(old, self.now[:, :, None] - self.sums[:, None], -jnp.inf))
        scores = repeated(since, asked) * _each_head(dot("rtgs,rngs->rtng", asked, keys), u.shape[2])
        return read(asked) * jnp.exp(repeated(self.now, asked))[..., None] + dot("rtnh,rnhp->rthp", scores, u)

    def of_new(self, asked: Array, k: Array) -> Array:
        """Returns weights between new tokens, [rows, n * steps, steps, heads]; undefined for later tokens."""
        between = jnp.exp(jnp.minimum(self.now[:, :, None] - self.now[:, None], 0))
        return repeated(between, asked) * _each_head(dot("rtgs,rngs->rtng", asked, k), self.now.shape[2])

    def until(self, position: Array, keys: Array, u: Array) -> tuple[Array, Array, Array]:
        """Returns the anchor's decay [rows, heads] up to each row's position, and keys and decayed u of the tokens."""
        index = position - self.order.position[:, 0] - 1
        there = tails.at(self.sums, index[:, None])[:, 0]
        before = (self.order.position < position[:, None])[..., None]
        left = jnp.exp(jnp.where(before, there[:, None] - self.sums, -jnp.inf))
        return jnp.exp(there), keys, u * left[..., None]


def repeated(of_steps: Array, asked: Array) -> Array:
    """Repeats values of steps for each of the vectors of a step."""
    return jnp.concatenate([of_steps] * (asked.shape[1] // of_steps.shape[1]), axis=1)


def _each_head(scores: Array, heads: int) -> Array:
    """[..., groups] as [..., heads]."""
    return jnp.repeat(scores, heads // scores.shape[-1], axis=-1)
