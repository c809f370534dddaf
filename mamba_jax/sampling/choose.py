"""Choosing tokens and verifying drafts.

Head j of a row has the logits after its certain tokens and drafts 0..j-1. Every head chooses its token as if there were
no drafts: the argmax, or a draw from its own distribution p. Drafts are accepted from the left for as long as they are
what was chosen; the first other choice is the new token. A draft x that does not depend on the draw is accepted with
probability p(x), which is all that one-hot proposals can have (Leviathan et al. 2023); and since draws are keyed by
position, a seeded row says the same with whatever drafts, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.sampling import draws
from mamba_jax.sampling.largest import WIDTH, argmax, in_blocks, largest
from mamba_jax.sampling.logits import add_bias, has_bias, has_penalties, once_if, penalise, truncate, weights_of
from mamba_jax.sampling.masks import Masks, apply_masks
from mamba_jax.sampling.table import MAX_LOGPROBS, SamplingTable
from mamba_jax.sharding.axis import keep_whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emission:
    """What rows emit: `accepted` drafts, then one new token."""

    tokens: Int[Array, "rows H"]
    """-1 = none."""
    count: Int[Array, " rows"]
    accepted: Int[Array, " rows"]
    finite: Bool[Array, "rows H"]
    """Whether all logits at the head were."""


@dataclass(frozen=True)
class SamplingInputs:
    """What a step's rows ask to be done with their logits. Arguments as for `choose`."""

    drafts: Int[Array, "rows drafts"]
    """-1 where there is none."""
    length: Int[Array, " rows"]
    row_id: Int[Array, " rows"]
    table: SamplingTable
    output_counts: Int[Array, "seats vocab"]
    prompt_seen: Bool[Array, "seats vocab"]
    masks: Masks | None
    masked: Bool[Array, " rows"]
    biased: Bool[Array, " rows"]
    penalised: Bool[Array, " rows"]
    random: Bool[Array, " rows"]

    @classmethod
    def of(
        cls,
        drafts: Int[Array, "rows drafts"],
        num_drafts: Int[Array, " rows"],
        length: Int[Array, " rows"],
        sample: Bool[Array, " rows"],
        row_id: Int[Array, " rows"],
        table: SamplingTable,
        output_counts: Int[Array, "seats vocab"],
        prompt_seen: Bool[Array, "seats vocab"],
        masks: Masks | None = None,
    ) -> SamplingInputs:
        """Looks at columns of a few bytes; the wide ones (stop ids, biases, counts) are for rows that need them."""
        biased, penalised, random = (
            sample & column[row_id] for column in (has_bias(table), has_penalties(table), table.temperature > 0)
        )
        return cls(
            drafts=jnp.where(jnp.arange(drafts.shape[1]) < num_drafts[:, None], drafts, -1),
            length=length,
            row_id=row_id,
            table=table,
            output_counts=output_counts,
            prompt_seen=prompt_seen,
            masks=masks,
            masked=jnp.zeros_like(sample) if masks is None else sample & masks.on[row_id],
            biased=biased,
            penalised=penalised,
            random=random,
        )

    @property
    def own(self) -> SamplingTable:
        """The rows' entries."""
        return self.table.take(self.row_id)

    @property
    def index(self) -> Int[Array, "rows H"]:
        """Where each head's token comes in its row's output."""
        prompt_length = self.table.prompt_length[self.row_id]
        return self.length[:, None] + jnp.arange(self.drafts.shape[1] + 1) - prompt_length[:, None]

    def adjusted(self, logits: Float[Array, "rows H vocab"]) -> Float[Array, "rows H vocab"]:
        """After masks, biases and penalties: what greedy rows take the largest of."""
        own, masks, row_id = self.own, self.masks, self.row_id

        def of_rows(table: Array) -> Array:
            return keep_whole(table[row_id])

        if masks is not None:
            logits = once_if(self.masked.any(), lambda x: apply_masks(x, masks, row_id), logits)
        logits = once_if(self.biased.any(), lambda x: add_bias(x, own, self.index), logits)
        return once_if(
            self.penalised.any(),
            lambda x: penalise(x, own, of_rows(self.output_counts), of_rows(self.prompt_seen), self.drafts),
            logits,
        )

    def weights(self, adjusted: Float[Array, "rows H vocab"]) -> Float[Array, "rows H vocab"]:
        """By which random rows draw."""
        own = self.own
        return truncate(weights_of(adjusted, own.temperature), own)

    def processed(self, logits: Float[Array, "rows H vocab"]) -> Float[Array, "rows H vocab"]:
        """Those whose softmax tokens are drawn from: adjusted, tempered and truncated; of greedy rows, adjusted."""
        adjusted = self.adjusted(logits)
        return jnp.where(self.random[:, None, None], jnp.log(self.weights(adjusted)), adjusted)


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
        logits: float32; on several devices they may be divided by the vocabulary.
        drafts: the rows' drafts; -1 is rejected by everyone.
        num_drafts: how many of them count.
        length: tokens (prompt and output) before each row's first draft; what makes positions for the draws.
        sample: rows that emit; others accept nothing and emit nothing.
        row_id: the rows' seats in the tables.
        masks: what rows may choose at each head; a draft that is not allowed is never chosen, and so rejected.
    """
    asked = SamplingInputs.of(drafts, num_drafts, length, sample, row_id, table, output_counts, prompt_seen, masks)
    drafts, heads = asked.drafts, jnp.arange(logits.shape[1])

    # Flat, as the product gave them, as far as nothing of rows is needed: a TPU lays them out anew by rows and heads.
    flat = logits.reshape(-1, logits.shape[-1])

    def greedily(flat: Float[Array, "n vocab"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        return largest(flat)

    def with_everything(flat: Float[Array, "n vocab"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        flat = keep_whole(flat)
        finite = jnp.isfinite(flat).all(axis=-1)
        adjusted = asked.adjusted(flat.reshape(logits.shape))

        def randomly(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            logits, best = carry
            weights = asked.weights(logits)
            drawn = draws.categorical(asked.own.key, asked.index, weights)
            # The weights take the place of the logits, which nothing needs any more.
            return weights, jnp.where(asked.random[:, None], drawn, best)

        return once_if(asked.random.any(), randomly, (adjusted, argmax(adjusted)))[1].reshape(-1), finite

    anything = (asked.masked | asked.biased | asked.penalised | asked.random).any()
    tokens, finite = (each.reshape(logits.shape[:-1]) for each in lax.cond(anything, with_everything, greedily, flat))
    accepted = jnp.cumprod(tokens[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    accepted = jnp.where(sample, accepted, 0)
    last = accepted[:, None]
    new = jnp.take_along_axis(tokens, last, axis=1)
    padded = jnp.concatenate([drafts, jnp.full_like(new, -1)], axis=1)
    emitted = jnp.where(heads < last, padded, jnp.where(heads == last, new, -1))
    return Emission(
        tokens=jnp.where(sample[:, None], emitted, -1),
        count=jnp.where(sample, accepted + 1, 0),
        accepted=accepted,
        finite=finite,
    )


def _top(logits: Float[Array, "*rows vocab"], count: int) -> tuple[Float[Array, "*rows n"], Int[Array, "*rows n"]]:
    """As `lax.top_k`, in two levels: on GPU that sorts all of the vocabulary, and its indices with it."""
    blocks = in_blocks(logits)
    # The first `count` lie in the `count` blocks with the largest maxima; of equals the first, there as here.
    _, chosen = lax.top_k(blocks.max(axis=-1), min(count, blocks.shape[-2]))
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
    best, place = lax.top_k(candidates.reshape(*logits.shape[:-1], -1), count)
    ids = jnp.take_along_axis(chosen, place // WIDTH, axis=-1) * WIDTH + place % WIDTH
    return best, ids.astype(jnp.int32)


def report_logprobs(
    logits: Float[Array, "*rows vocab"],
    tokens: Int[Array, "*rows"],
    wanted: Int[Array, "*rows"],
    process: Callable[[Array], Array] = lambda logits: logits,
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows top"], Float[Array, "*rows top"]]:
    """Log-probabilities of tokens and of the most likely alternatives, computed only where some row wants them.

    Args:
        logits: float32, as the model gave them; on several devices they may be divided by the vocabulary.
        tokens: -1 for none.
        wanted: how many alternatives; -1 for nothing at all.
        process: what is done with the logits first.
    Returns:
        token log-probabilities, ids of the alternatives, their log-probabilities.
    """
    top = min(MAX_LOGPROBS, logits.shape[-1])

    def nothing():
        return jnp.zeros(tokens.shape), jnp.zeros((*tokens.shape, top), jnp.int32), jnp.zeros((*tokens.shape, top))

    def something():
        shown = process(keep_whole(logits))
        normaliser = jax.nn.logsumexp(shown, axis=-1, keepdims=True)
        token = jnp.take_along_axis(shown, jnp.maximum(tokens, 0)[..., None], axis=-1) - normaliser

        def alternatives():
            best, ids = _top(shown, top)
            return ids, best - normaliser

        ids, best = lax.cond((wanted > 0).any(), alternatives, lambda: nothing()[1:])
        return token[..., 0], ids, best

    return lax.cond((wanted >= 0).any(), something, nothing)
