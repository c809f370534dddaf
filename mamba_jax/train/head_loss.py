"""Losses of the head's logits, computed for a few tokens at a time with gradients, without an array of all logits.

With a vocabulary of V, logits and their gradient are 2 V numbers for each token. They exceed a CPU's caches and cost
more time than the products that compute them. The gradient of a cross-entropy follows directly from the logits (softmax
minus target), so it is computed together with them, and nothing is computed twice.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TOKENS_AT_ONCE = 128
"""Approximate number. On CPU, the fastest of 128, 512 and 2048 (vocabulary 4096)."""
_F32 = jnp.float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mean_cross_entropy(
    hidden: Float[Array, "batch length hidden"],
    weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "batch length"],
    multiplier: float = 1.0,
) -> Float[Array, ""]:
    """Mean of -log softmax(multiplier * weight hidden)[target] over all positions that have a target, in float32.

    Args:
        hidden: hidden states after the final norm.
        weight: the head's weight.
        targets: the next tokens; negative: none.
        multiplier: factor of the logits.
    """
    return _cross_entropy(hidden, weight, targets, multiplier, gradient=False)[0]


def _cross_entropy(
    hidden: Array, weight: Array, targets: Array, multiplier: float, *, gradient: bool
) -> tuple[Array, tuple[Array, ...]]:
    def piece(carry: tuple[Array, ...], xs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Any]:
        rows, wanted = _flat(xs[0]), xs[1].reshape(-1)
        logits = multiplier * _product(weight, rows.T)
        share, mass, highest = _exponentials(logits)
        of_target = jnp.take_along_axis(logits, jnp.maximum(wanted, 0)[None], axis=0)[0]
        total = jnp.where(wanted >= 0, jnp.log(mass) + highest - of_target, 0.0).sum()
        if not gradient:
            return (carry[0] + total,), None
        change = share / mass - (jnp.arange(weight.shape[0])[:, None] == wanted)
        change = (multiplier * change * (wanted >= 0)).astype(rows.dtype)
        to_rows = _product(change.T, weight).reshape(xs[0].shape).astype(hidden.dtype)
        return (carry[0] + total, carry[1] + _product(change, rows)), to_rows

    start = (jnp.zeros((), _F32), *([jnp.zeros(weight.shape, _F32)] if gradient else []))
    (total, *to_weight), to_hidden = lax.scan(piece, start, tuple(_pieces(x, 1) for x in (hidden, targets)))
    count = jnp.maximum((targets >= 0).sum(), 1).astype(_F32)
    mean = total / count
    if not gradient:
        return mean, ()
    to_hidden = (_whole(to_hidden, hidden, 1) / count).astype(hidden.dtype)
    return mean, (to_hidden, (to_weight[0] / count).astype(weight.dtype))


def _cross_entropy_backward(multiplier: float, saved: tuple[Array, ...], change: Array) -> tuple[Array, Array, None]:
    to_hidden, to_weight = saved
    return (change * to_hidden).astype(to_hidden.dtype), (change * to_weight).astype(to_weight.dtype), None


mean_cross_entropy.defvjp(functools.partial(_cross_entropy, gradient=True), _cross_entropy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def distillation(
    drafting: Float[Array, "drafts batch length hidden"],
    hidden: Float[Array, "batch length hidden"],
    weight: Float[Array, "vocab hidden"],
    multiplier: float = 1.0,
) -> tuple[Float[Array, " drafts"], Float[Array, " drafts"]]:
    """Mean cross-entropy of drafts against the model's own distribution, and the frequency of equal choices.

    Draft number n (from 0) makes no prediction for the first n + 1 positions. Differentiable in `drafting` only.

    Args:
        drafting: the draft layer's hidden states, pass by pass (see `rollout`).
        hidden: the model's hidden states.
        weight: the weight of the shared head.
        multiplier: factor of the logits.
    """
    return _distillation(drafting, hidden, weight, multiplier, gradient=False)[0]


def _distillation(
    drafting: Array, hidden: Array, weight: Array, multiplier: float, *, gradient: bool
) -> tuple[tuple[Array, Array], Array]:
    drafts, batch, length = drafting.shape[:3]
    counts = jnp.arange(length) > jnp.arange(drafts)[:, None]
    counts = jnp.broadcast_to(counts[:, None], (drafts, batch, length)).astype(_F32)
    counts /= counts.sum((1, 2), keepdims=True)

    def piece(carry: tuple[Array, Array], xs: tuple[Array, ...]) -> tuple[tuple[Array, Array], Any]:
        rows, own, counts = _flat(xs[0]), _flat(xs[1]), xs[2].reshape(drafts, -1)
        guide = multiplier * _product(weight, own.T)
        share, mass, best = _exponentials(guide)
        share = (share / mass)[:, None]
        logits = multiplier * _product(weight, rows.T)
        own_share, own_mass, highest = _exponentials(logits)
        logits = logits.reshape(-1, drafts, own.shape[0])
        by_draft = (jnp.log(own_mass) + highest).reshape(drafts, -1) - (share * logits).sum(axis=0)
        # Not argmax, which XLA computes element by element on CPU.
        at_best = jnp.where((guide == best)[:, None], logits, -jnp.inf).max(axis=0)
        agrees = at_best >= highest.reshape(drafts, -1)
        carry = carry[0] + (counts * by_draft).sum(1), carry[1] + (counts * agrees).sum(1)
        if not gradient:
            return carry, None
        change = multiplier * counts * ((own_share / own_mass).reshape(logits.shape) - share)
        to_rows = _product(change.reshape(-1, rows.shape[0]).T.astype(rows.dtype), weight)
        return carry, to_rows.reshape(xs[0].shape).astype(drafting.dtype)

    start = jnp.zeros(drafts, _F32), jnp.zeros(drafts, _F32)
    figures, to_drafting = lax.scan(piece, start, (_pieces(drafting, 2), _pieces(hidden, 1), _pieces(counts, 2)))
    return figures, _whole(to_drafting, drafting, 2) if gradient else jnp.zeros(())


def _distillation_backward(multiplier: float, to_drafting: Array, change: tuple[Array, Array]) -> Any:
    return (change[0][:, None, None, None] * to_drafting).astype(to_drafting.dtype), None, None


distillation.defvjp(functools.partial(_distillation, gradient=True), _distillation_backward)


def _pieces(x: Array, axis: int) -> Array:
    """Split along the length, `axis`; the batch axis before it may be sharded. The pieces become the first axis."""
    batch, length = x.shape[axis - 1 : axis + 1]
    sizes = (n for n in range(1, length + 1) if length % n == 0 and (n == 1 or n * batch <= TOKENS_AT_ONCE))
    size = max(sizes, default=1)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], length // size, size, *x.shape[axis + 1 :]), axis, 0)


def _whole(pieces: Array, like: Array, axis: int) -> Array:
    return jnp.moveaxis(pieces, 0, axis).reshape(like.shape)


def _flat(x: Float[Array, "*places hidden"]) -> Float[Array, "rows hidden"]:
    return x.reshape(-1, x.shape[-1])


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=_F32)


def _exponentials(logits: Float[Array, "vocab rows"]) -> tuple[Array, Array, Array]:
    """exp(logits - highest), its sum, and the highest; by columns, as XLA vectorizes reductions over the first axis."""
    highest = logits.max(axis=0)
    share = jnp.exp(logits - highest)
    return share, share.sum(axis=0), highest
