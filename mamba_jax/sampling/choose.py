"""Choosing tokens and verifying drafts.

Head j of a row has the logits after its certain tokens and drafts 0..j-1. Every head chooses its token as if there were
no drafts: the argmax, or a draw from its own distribution p. Drafts are accepted from the left for as long as they are
what was chosen; the first other choice is the new token. A draft x that does not depend on the draw is accepted with
probability p(x), which is all that one-hot proposals can have (Leviathan et al. 2023); and since draws are keyed by
position, a seeded row says the same with whatever drafts, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.sampling import draws
from mamba_jax.sampling.logits import add_bias, has_bias, has_penalties, once_if, penalise, truncate, weights_of
from mamba_jax.sampling.masks import Masks, apply_masks
from mamba_jax.sampling.table import MAX_LOGPROBS, SamplingTable

_WIDTH = 128  # of the blocks that argmax and top-k look at first


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emission:
    """What rows emit: `accepted` drafts, then one new token."""

    tokens: Int[Array, "rows H"]
    """-1 = none."""
    count: Int[Array, " rows"]
    accepted: Int[Array, " rows"]


def choose(
    logits: Float[Array, "rows H vocab"],
    *,
    drafts: Int[Array, "rows H-1"],
    num_drafts: Int[Array, " rows"],
    length: Int[Array, " rows"],
    sample: Bool[Array, " rows"],
    row_id: Int[Array, " rows"],
    table: SamplingTable,
    output_counts: Int[Array, "seats vocab"],
    prompt_seen: Bool[Array, "seats vocab"],
    masks: Masks | None = None,
) -> Emission:
    """Verifies drafts and draws one new token for each row.

    Args:
        logits: float32.
        drafts: the rows' drafts; -1 is rejected by everyone.
        num_drafts: how many of them count.
        length: tokens (prompt and output) before each row's first draft; what makes positions for the draws.
        sample: rows that emit; others accept nothing and emit nothing.
        row_id: the rows' seats in the tables.
        masks: what rows may choose at each head; a draft that is not allowed is never chosen, and so rejected.
    """
    heads = jnp.arange(logits.shape[1])
    drafts = jnp.where(heads[:-1] < num_drafts[:, None], drafts, -1)
    # Columns of a few bytes; the wide ones (stop ids, biases, counts) are read only by rows that need them.
    biased, penalised, random = (
        sample & column[row_id] for column in (has_bias(table), has_penalties(table), table.temperature > 0)
    )

    masked = jnp.zeros_like(sample) if masks is None else sample & masks.on[row_id]

    def greedily(logits: Float[Array, "rows H vocab"]) -> Int[Array, "rows H"]:
        return _argmax(logits)

    def with_everything(logits: Float[Array, "rows H vocab"]) -> Int[Array, "rows H"]:
        own = table.take(row_id)
        index = length[:, None] + heads - own.prompt_length[:, None]
        if masks is not None:
            logits = once_if(masked.any(), lambda x: apply_masks(x, masks, row_id), logits)
        logits = once_if(biased.any(), lambda x: add_bias(x, own, index), logits)
        logits = once_if(
            penalised.any(), lambda x: penalise(x, own, output_counts[row_id], prompt_seen[row_id], drafts), logits
        )

        def randomly(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            logits, best = carry
            weights = truncate(weights_of(logits, own.temperature), own)
            drawn = draws.categorical(own.key, index, weights)
            # The weights take the place of the logits, which nothing needs any more.
            return weights, jnp.where(random[:, None], drawn, best)

        return once_if(random.any(), randomly, (logits, greedily(logits)))[1]

    tokens = lax.cond((masked | biased | penalised | random).any(), with_everything, greedily, logits)
    accepted = jnp.cumprod(tokens[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    accepted = jnp.where(sample, accepted, 0)
    last = accepted[:, None]
    new = jnp.take_along_axis(tokens, last, axis=1)
    padded = jnp.concatenate([drafts, jnp.full_like(new, -1)], axis=1)
    emitted = jnp.where(heads < last, padded, jnp.where(heads == last, new, -1))
    return Emission(
        tokens=jnp.where(sample[:, None], emitted, -1), count=jnp.where(sample, accepted + 1, 0), accepted=accepted
    )


def _argmax(logits: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """The first of the largest, in two levels: XLA:CPU's own argmax takes 20 times as long."""
    blocks = _in_blocks(logits)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    within = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * _WIDTH + jnp.argmax(within, axis=-1)).astype(jnp.int32)


def _top(logits: Float[Array, "*rows vocab"], count: int) -> tuple[Float[Array, "*rows n"], Int[Array, "*rows n"]]:
    """As `lax.top_k`, in two levels: on GPU that sorts all of the vocabulary, and its indices with it."""
    blocks = _in_blocks(logits)
    # The first `count` lie in the `count` blocks with the largest maxima; of equals the first, there as here.
    _, chosen = lax.top_k(blocks.max(axis=-1), min(count, blocks.shape[-2]))
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
    best, place = lax.top_k(candidates.reshape(*logits.shape[:-1], -1), count)
    ids = jnp.take_along_axis(chosen, place // _WIDTH, axis=-1) * _WIDTH + place % _WIDTH
    return best, ids.astype(jnp.int32)


def _in_blocks(logits: Float[Array, "*rows vocab"]) -> Float[Array, "*rows blocks width"]:
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -logits.shape[-1] % _WIDTH)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*logits.shape[:-1], -1, _WIDTH)


def report_logprobs(
    logits: Float[Array, "*rows vocab"], tokens: Int[Array, "*rows"], wanted: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows top"], Float[Array, "*rows top"]]:
    """Log-probabilities of tokens and of the most likely alternatives, computed only where some row wants them.

    Args:
        logits: float32, as the model gave them.
        tokens: -1 for none.
        wanted: how many alternatives; -1 for nothing at all.
    Returns:
        token log-probabilities, ids of the alternatives, their log-probabilities.
    """
    top = min(MAX_LOGPROBS, logits.shape[-1])

    def nothing():
        return jnp.zeros(tokens.shape), jnp.zeros((*tokens.shape, top), jnp.int32), jnp.zeros((*tokens.shape, top))

    def something():
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        token = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1) - normaliser

        def alternatives():
            best, ids = _top(logits, top)
            return ids, best - normaliser

        ids, best = lax.cond((wanted > 0).any(), alternatives, lambda: nothing()[1:])
        return token[..., 0], ids, best

    return lax.cond((wanted >= 0).any(), something, nothing)
