"""Decays of a replay, one for each head or for each channel of its keys: weights of pairs of tokens.

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
from kernels_pallas.recurrence.scan.by_channel import decayed_products
from kernels_pallas.tails import Order

F32 = jnp.float32
dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class ByHead:
    """Decays since the anchors, one for each head: the heads of a group share products."""

    order: Order
    sums: Array
    """[rows, entries, heads]: of log decays, from the anchor up to and with each token."""
    now: Array
    """[rows, steps, heads]: the sums of new tokens."""

    @classmethod
    def of(cls, kept: Array, new: Array, order: Order) -> ByHead:
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


@dataclasses.dataclass(frozen=True)
class ByChannel:
    """Decays since the anchors of each channel, which scale the operands; methods are those of `ByHead`.

    The weight between two tokens is a sum over channels of products, which would overflow if one factor were the
    inverse of a decay (see `kernels_pallas.recurrence.scan.by_channel`). But every token of the tail precedes every new
    one, so the decay between the two is the decay to the end of the tail times the decay from there on. Neither factor
    is above 1, and both are sums of only the log decays in between; a difference of long sums would lose the digits of
    recent decays. The few new tokens are divided into halves, as in a block of the scan.
    """

    order: Order
    kept: Array
    """[rows, entries, heads, state]: log decays since the anchor, zeros where there is no token."""
    new: Array
    """[rows, steps, heads, state]: log decays of new tokens, zeros at padding."""

    @classmethod
    def of(cls, kept: Array, new: Array, order: Order) -> ByChannel:
        return cls(order, kept, jnp.where(order.is_new[..., None, None], new, 0).astype(kept.dtype))

    def of_old(self, read: Callable[[Array], Array], asked: Array, keys: Array, u: Array) -> Array:
        before, after = self._around(self.order.is_old)
        asked = self._own(asked) * jnp.exp(repeated(jnp.cumsum(self.new, axis=1), asked))
        scores = dot("rths,rnhs->rtnh", asked, self._own(keys) * after)
        return read(asked * before[:, None]) + dot("rtnh,rnhp->rthp", scores, u)

    def of_new(self, asked: Array, k: Array) -> Array:
        rows, steps, heads, state = self.new.shape
        # Repeated halving needs a power of two; the added tokens are padding.
        size = 1 << (steps - 1).bit_length()

        def by_head(tokens: Array) -> Array:
            """[rows, steps, ...] as [rows * heads, size, state]."""
            padded = jnp.pad(self._own(tokens), [(0, 0), (0, size - steps), (0, 0), (0, 0)])
            return padded.swapaxes(1, 2).reshape(rows * heads, size, state)

        count = asked.shape[1] // steps
        vectors = [by_head(one) for one in jnp.split(asked, count, axis=1)]
        products, _, _ = decayed_products(jnp.concatenate(vectors, axis=1), by_head(k), by_head(self.new))
        products = products.reshape(rows, heads, count, size, size)[:, :, :, :steps, :steps]
        # A token's query also reads its own key.
        own = dot("rths,rths->rth", self._own(asked[:, -steps:]), self._own(k))
        products = products.at[:, :, -1].add(jnp.eye(steps) * own.swapaxes(1, 2)[..., None])
        return products.transpose(0, 2, 3, 4, 1).reshape(rows, count * steps, steps, heads)

    def until(self, position: Array, keys: Array, u: Array) -> tuple[Array, Array, Array]:
        absorbed = self.order.position < position[:, None]
        of_anchor, after = self._around(absorbed)
        return of_anchor, self._own(keys) * after, jnp.where(absorbed[..., None, None], u, 0)

    def _around(self, which: Array) -> tuple[Array, Array]:
        """Returns the decay over these tokens, [rows, entries], and the decay after each of them."""
        logs = jnp.where(which[..., None, None], self.kept, 0)
        following = jnp.concatenate([logs[:, 1:], jnp.zeros_like(logs[:, :1])], axis=1)
        return jnp.exp(logs.sum(axis=1)), jnp.exp(lax.cumsum(following, axis=1, reverse=True))

    def _own(self, keys: Array) -> Array:
        """Repeats the keys [rows, n, groups, state] of each group for each of its heads."""
        return jnp.repeat(keys, self.new.shape[2] // keys.shape[2], axis=2)
