"""Choosing tokens and verifying drafts.

Head j of a row has the logits after the row's certain tokens and drafts 0..j-1. Every head chooses its token without
regard to the drafts: the argmax, or a draw from its distribution p. Drafts are accepted from the left while they equal
the chosen tokens; the first different choice is the new token. A draft x that does not depend on the draw is accepted
with probability p(x), the maximum for one-hot proposals (Leviathan et al. 2023). Draws are keyed by position, so a
seeded row emits the same tokens with any drafts, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.fixed_order import log_sum_exp
from mamba_jax.sampling import draws
from mamba_jax.sampling.largest import WIDTH, argmax, in_blocks, largest
from mamba_jax.sampling.logits import add_bias, has_bias, has_penalties, once_if, penalise, truncate, weights_of
from mamba_jax.sampling.masks import Masks, apply_masks
from mamba_jax.sampling.table import MAX_LOGPROBS, SamplingTable
from mamba_jax.sharding.axis import TENSOR, axis_index, axis_mesh, keep_whole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emission:
    """The tokens that rows emit: `accepted` drafts, then one new token."""

    tokens: Int[Array, "rows H"]
    """-1 = none."""
    count: Int[Array, " rows"]
    accepted: Int[Array, " rows"]
    finite: Bool[Array, "rows H"]
    """Whether all logits at the head are finite."""


@dataclass(frozen=True)
class SamplingInputs:
    """The options of a step's rows for their logits. Arguments as for `choose`."""

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
    any_penalised: Bool[Array, ""]
    """Whether any row of the step is penalised, on whichever device it is sampled."""
    rows_of: Callable[[Array], Array]
    """Reads the rows' entries of a table [seats, vocab]."""

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
        """Reads only narrow columns; wide ones (stop ids, biases, counts) are read only if rows need them."""
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
            any_penalised=penalised.any(),
            rows_of=lambda table: keep_whole(table[row_id]),
        )

    def on_this_device(self) -> SamplingInputs:
        """Returns the inputs of this device's share of the rows. The tables of the vocabulary are the device's part."""
        count = self.row_id.shape[0] // lax.axis_size(TENSOR)

        def own(values: Array) -> Array:
            return lax.dynamic_slice_in_dim(values, axis_index() * count, count)

        return replace(
            self,
            drafts=own(self.drafts),
            length=own(self.length),
            row_id=own(self.row_id),
            masked=own(self.masked),
            biased=own(self.biased),
            penalised=own(self.penalised),
            random=own(self.random),
            rows_of=lambda table: own_rows(table[self.row_id]),
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
        """Returns logits after masks, biases and penalties. Greedy rows choose the largest."""
        own, masks, row_id = self.own, self.masks, self.row_id
        if masks is not None:
            logits = once_if(self.masked.any(), lambda x: apply_masks(x, masks, row_id), logits)
        logits = once_if(self.biased.any(), lambda x: add_bias(x, own, self.index), logits)
        return once_if(
            self.any_penalised,
            lambda x: penalise(x, own, self.rows_of(self.output_counts), self.rows_of(self.prompt_seen), self.drafts),
            logits,
        )

    def weights(self, adjusted: Float[Array, "rows H vocab"]) -> Float[Array, "rows H vocab"]:
        """Returns the weights with which random rows draw."""
        own = self.own
        return truncate(weights_of(adjusted, own.temperature), own)

    def processed(self, logits: Float[Array, "rows H vocab"]) -> Float[Array, "rows H vocab"]:
        """Returns logits whose softmax is drawn from: adjusted, tempered and truncated; for greedy rows, adjusted."""
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
        drafts: the rows' drafts; -1 is always rejected.
        num_drafts: number of valid drafts.
        length: tokens (prompt and output) before each row's first draft; determines the positions of the draws.
        sample: rows that emit; others accept and emit nothing.
        row_id: the rows' seats in the tables.
        masks: tokens that rows may choose at each head; a draft that is not allowed is never chosen, and so rejected.
    """
    asked = SamplingInputs.of(drafts, num_drafts, length, sample, row_id, table, output_counts, prompt_seen, masks)
    drafts, heads = asked.drafts, jnp.arange(logits.shape[1])

    # Flat, as the product returns them, where rows do not matter: a TPU would change the layout by rows and heads.
    flat = logits.reshape(-1, logits.shape[-1])

    def greedily(flat: Float[Array, "n vocab"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        return largest(flat)

    def with_everything(flat: Float[Array, "n vocab"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        return _by_rows(flat.reshape(logits.shape), asked)

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


def own_rows(part: Shaped[Array, "rows *heads part"]) -> Shaped[Array, "own *heads vocab"]:
    """Returns all of the vocabulary for this device's share of the rows, from its part of the vocabulary for all."""
    return lax.all_to_all(part, TENSOR, split_axis=0, concat_axis=part.ndim - 1, tiled=True)


def _by_rows(logits: Float[Array, "rows H vocab"], asked: SamplingInputs) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Chooses by all of a row's options. Returns the tokens, and whether all logits are finite, of rows and heads.

    On several devices each samples its share of the rows, if rows and vocabulary divide evenly; otherwise each samples
    all of them. Both choose the same tokens, because no operation crosses rows.
    """
    mesh = axis_mesh()
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    if mesh is None or logits.shape[0] % shards or logits.shape[-1] % shards:
        tokens, finite = _chosen(keep_whole(logits), asked)
        return tokens.reshape(-1), finite.reshape(-1)

    arrays = {field.name: getattr(asked, field.name) for field in fields(asked) if field.name != "rows_of"}
    specs = {name: P(None, TENSOR) if name in ("output_counts", "prompt_seen") else P() for name in arrays}

    def on_each_device(part: Float[Array, "rows H part"], arrays: dict[str, Any]) -> tuple[Array, ...]:
        here = replace(asked, **arrays).on_this_device()
        return tuple(lax.all_gather(each, TENSOR, tiled=True).reshape(-1) for each in _chosen(own_rows(part), here))

    tokens, finite = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(P(None, None, TENSOR), specs),
        out_specs=(P(), P()),
        check_vma=False,
    )(logits, arrays)
    return tokens, finite


def _chosen(
    logits: Float[Array, "rows H vocab"], asked: SamplingInputs
) -> tuple[Int[Array, "rows H"], Bool[Array, "rows H"]]:
    finite = jnp.isfinite(logits).all(axis=-1)
    adjusted = asked.adjusted(logits)

    def randomly(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        logits, best = carry
        weights = asked.weights(logits)
        drawn = draws.categorical(asked.own.key, asked.index, weights)
        # The weights replace the logits, which are no longer needed.
        return weights, jnp.where(asked.random[:, None], drawn, best)

    return once_if(asked.random.any(), randomly, (adjusted, argmax(adjusted)))[1], finite


def _top(logits: Float[Array, "*rows vocab"], count: int) -> tuple[Float[Array, "*rows n"], Int[Array, "*rows n"]]:
    """Computes `lax.top_k` in two levels, because on GPU `lax.top_k` sorts the whole vocabulary with its indices."""
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
        wanted: number of alternatives; -1 to report nothing.
        process: function applied to the logits first.
    Returns:
        token log-probabilities, ids of the alternatives, their log-probabilities.
    """
    top = min(MAX_LOGPROBS, logits.shape[-1])

    def nothing():
        return jnp.zeros(tokens.shape), jnp.zeros((*tokens.shape, top), jnp.int32), jnp.zeros((*tokens.shape, top))

    def something():
        shown = process(keep_whole(logits))
        normaliser = log_sum_exp(shown)
        token = jnp.take_along_axis(shown, jnp.maximum(tokens, 0)[..., None], axis=-1) - normaliser

        def alternatives():
            best, ids = _top(shown, top)
            return ids, best - normaliser

        ids, best = lax.cond((wanted > 0).any(), alternatives, lambda: nothing()[1:])
        return token[..., 0], ids, best

    return lax.cond((wanted >= 0).any(), something, nothing)
