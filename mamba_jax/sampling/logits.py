"""Applies sampling parameters to logits [rows, H, vocab], in vLLM's order: bias and held-back ids, penalties,
temperature, min-p, top-k, top-p. And the parameters of a step's rows, with the counts of emitted tokens for penalties.

Each step runs only if some row needs it, and replaces its input, so that only one array of the vocabulary's size
exists. The logits of other rows stay bitwise equal. From temperature on, tokens have weights instead of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.fixed_order import exp, quotient, rounded, row_max, row_sum
from mamba_jax.sampling.masks import Masks, apply_masks
from mamba_jax.sampling.table import SamplingTable
from mamba_jax.sharding.axis import TENSOR, axis_index, axis_mesh, keep_whole

Logits = Float[Array, "rows H vocab"]
Weights = Float[Array, "rows H vocab"]
T = TypeVar("T")


def add_bias(logits: Logits, table: SamplingTable, output_index: Int[Array, "rows H"]) -> Logits:
    """Adds `logit_bias`, then excludes `stop_ids` for rows with fewer than `min_tokens` output tokens."""
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, :, _drop(table.bias_ids, logits)].add(table.bias_values[:, :, None], mode="drop")
    early = output_index < table.min_tokens[:, None]
    held = jnp.where(early[:, None, :], _drop(table.stop_ids, logits)[:, :, None], logits.shape[-1])
    heads = jnp.arange(logits.shape[1])
    return logits.at[rows[:, :, None], heads, held].set(-jnp.inf, mode="drop")


def _drop(ids: Int[Array, "rows n"], logits: Logits) -> Int[Array, "rows n"]:
    """Moves padding ids past the vocabulary, where scatters drop them: negative indices count from the end."""
    return jnp.where(ids < 0, logits.shape[-1], ids)


def penalize(
    logits: Logits,
    table: SamplingTable,
    output_counts: Int[Array, "rows vocab"],
    prompt_seen: Bool[Array, "rows vocab"],
    drafts: Int[Array, "rows H-1"],
) -> Logits:
    """Applies repetition penalties to tokens of prompt and output, frequency and presence penalties to output tokens.

    Logits j follow drafts 0..j-1, so these drafts count as output too.
    """
    counts = jnp.broadcast_to(output_counts[:, None, :], logits.shape)
    heads, token = jnp.arange(logits.shape[1])[:, None], jnp.arange(logits.shape[2])
    for j in range(drafts.shape[1]):
        # Compare instead of scattering: XLA then needs no second array of the vocabulary's size.
        counts = counts + ((j < heads) & (token == drafts[:, j, None, None]))
    repetition = table.repetition_penalty[:, None, None]
    factor = jnp.where((counts > 0) | prompt_seen[:, None, :], repetition, 1.0)
    logits = jnp.where(logits > 0, logits / factor, rounded(logits * factor))
    logits = logits - rounded(table.frequency_penalty[:, None, None] * counts)
    return logits - jnp.where(counts > 0, table.presence_penalty[:, None, None], 0.0)


def has_bias(table: SamplingTable) -> Bool[Array, " rows"]:
    """Returns which rows `add_bias` may change."""
    return (table.bias_ids[:, 0] >= 0) | (table.min_tokens > 0)


def has_penalties(table: SamplingTable) -> Bool[Array, " rows"]:
    """Returns which rows `penalize` changes."""
    return (table.repetition_penalty != 1) | (table.frequency_penalty != 0) | (table.presence_penalty != 0)


def weights_of(logits: Logits, temperature: Float[Array, " rows"]) -> Weights:
    """Returns the weights of tokens in a draw: 1 for the most likely, 0 for tokens that are never drawn."""
    scaled = quotient(logits, jnp.where(temperature > 0, temperature, 1.0)[:, None, None])
    return exp(scaled - row_max(scaled))


def limits_of(table: SamplingTable) -> tuple[Float[Array, "rows 1"], Int[Array, "rows 1"], Float[Array, "rows 1"]]:
    """Returns min-p, top-k and top-p, which limit nothing in greedy rows."""
    random = table.temperature > 0
    limits = ((table.min_p, 0.0), (table.top_k, 0), (table.top_p, 1.0))
    min_p, top_k, top_p = (jnp.where(random, limit, off)[:, None] for limit, off in limits)
    return min_p, top_k, top_p


def truncate(weights: Weights, table: SamplingTable) -> Weights:
    """Sets the probabilities that min-p, top-k and top-p exclude to 0, in this order. Ties at a limit all stay."""
    min_p, top_k, top_p = (limit[:, None] for limit in limits_of(table))

    def by_min_p(weights: Weights) -> Weights:
        return jnp.where(weights < min_p, 0.0, weights)

    def by_top_k(weights: Weights) -> Weights:
        least = _largest(weights, lambda over: over.sum(-1, keepdims=True, dtype=jnp.int32) >= top_k)
        return jnp.where((top_k > 0) & (weights < least), 0.0, weights)

    def by_top_p(weights: Weights) -> Weights:
        # At least the most likely token stays, however small top_p is.
        wanted = jnp.maximum(top_p * row_sum(weights), jnp.finfo(weights.dtype).tiny)
        least = _largest(weights, lambda over: row_sum(jnp.where(over, weights, 0.0)) >= wanted)
        return jnp.where((top_p < 1) & (weights < least), 0.0, weights)

    for asked, limit in ((min_p > 0, by_min_p), (top_k > 0, by_top_k), (top_p < 1, by_top_p)):
        weights = once_if(asked.any(), limit, weights)
    return weights


def once_if(needed: Bool[Array, ""], change: Callable[[T], T], value: T) -> T:
    """Returns change(value) if needed, else the value. Uses a loop of at most one round: `lax.cond` would copy it."""
    return lax.fori_loop(0, needed.astype(jnp.int32), lambda _, value: change(value), value)


def _largest(weights: Weights, enough) -> Float[Array, "rows H 1"]:
    """Finds the largest t for which the weights of at least t are `enough`, bit by bit: 30 passes without a sort.

    Non-negative floats are in the order of their bits, and floats up to 1 use 30 bits.
    """

    def as_float(bits):
        return lax.bitcast_convert_type(bits, jnp.float32)

    def with_bit(i, least):
        higher = least | (jnp.uint32(1 << 29) >> i.astype(jnp.uint32))
        return jnp.where(enough(weights >= as_float(higher)), higher, least)

    return as_float(lax.fori_loop(0, 30, with_bit, jnp.zeros((*weights.shape[:-1], 1), jnp.uint32)))


@dataclass(frozen=True)
class SamplingInputs:
    """The options of a step's rows for their logits. `SamplingInputs.of` makes them."""

    drafts: Int[Array, "rows drafts"]
    """-1 where there is none: always rejected."""
    length: Int[Array, " rows"]
    """Tokens (prompt and output) before each row's first draft; determines the positions of the draws."""
    sample: Bool[Array, " rows"]
    """Rows that emit; others accept and emit nothing."""
    row_id: Int[Array, " rows"]
    """The rows' seats in the tables."""
    table: SamplingTable
    output_counts: Int[Array, "seats vocab"]
    prompt_seen: Bool[Array, "seats vocab"]
    masks: Masks | None
    """Tokens that rows may choose at each head; a draft that is not allowed is never chosen, and so rejected."""
    masked: Bool[Array, " rows"]
    biased: Bool[Array, " rows"]
    penalized: Bool[Array, " rows"]
    random: Bool[Array, " rows"]
    any_penalized: Bool[Array, ""]
    """Whether any row of the step is penalized, on whichever device it is sampled."""
    all_seats: Int[Array, " n"] | None = None
    """The seats of all devices' rows, where each device samples its share; None: every device samples all rows."""
    supports: Bool[Array, " rows"] | None = None
    """Which rows report the tokens that theirs are drawn from; None: no program does."""

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
        """Returns the inputs of rows with `num_drafts` valid drafts each.

        Reads only narrow columns; wide ones (stop ids, biases, counts) are read only if rows need them.
        """
        biased, penalized, random = (
            sample & column[row_id] for column in (has_bias(table), has_penalties(table), table.temperature > 0)
        )
        return cls(
            drafts=jnp.where(jnp.arange(drafts.shape[1]) < num_drafts[:, None], drafts, -1), length=length,
            sample=sample, row_id=row_id, table=table, output_counts=output_counts, prompt_seen=prompt_seen,
            masks=masks, masked=jnp.zeros_like(sample) if masks is None else sample & masks.on[row_id], biased=biased,
            penalized=penalized, random=random, any_penalized=penalized.any(),
        )  # fmt: skip

    def on_this_device(self) -> SamplingInputs:
        """Returns the inputs for this device's share of the rows. Tables of the vocabulary stay divided."""
        count = self.row_id.shape[0] // lax.axis_size(TENSOR)

        def own(values: Array) -> Array:
            return lax.dynamic_slice_in_dim(values, axis_index() * count, count)

        divided = ("drafts", "length", "sample", "row_id", "masked", "biased", "penalized", "random", "supports")
        return replace(
            self, all_seats=self.row_id, **{name: jax.tree.map(own, getattr(self, name)) for name in divided}
        )

    def rows_of(self, table: Shaped[Array, "seats part"]) -> Shaped[Array, "rows vocab"]:
        """Returns the rows' entries of a table. If devices divide the rows, each has a part of the table's columns."""
        return keep_whole(table[self.row_id]) if self.all_seats is None else own_rows(table[self.all_seats])

    @property
    def own(self) -> SamplingTable:
        """The rows' entries."""
        return self.table.take(self.row_id)

    @property
    def index(self) -> Int[Array, "rows H"]:
        """The index of each head's token in its row's output."""
        prompt_length = self.table.prompt_length[self.row_id]
        return self.length[:, None] + jnp.arange(self.drafts.shape[1] + 1) - prompt_length[:, None]

    @property
    def adjusts(self) -> Bool[Array, ""]:
        """Whether `adjusted` changes any logits."""
        return self.masked.any() | self.biased.any() | self.any_penalized

    def adjusted(self, flat: Float[Array, "*n vocab"]) -> Float[Array, "*n vocab"]:
        """Returns logits after masks, biases and penalties. Greedy rows choose the largest."""
        own, masks, row_id, logits = self.own, self.masks, self.row_id, self._by_rows(flat)
        if masks is not None:
            logits = once_if(self.masked.any(), lambda x: apply_masks(x, masks, row_id), logits)
        logits = once_if(self.biased.any(), lambda x: add_bias(x, own, self.index), logits)
        logits = once_if(
            self.any_penalized,
            lambda x: penalize(x, own, self.rows_of(self.output_counts), self.rows_of(self.prompt_seen), self.drafts),
            logits,
        )
        return logits.reshape(flat.shape)

    def processed(self, flat: Float[Array, "*n vocab"]) -> Float[Array, "*n vocab"]:
        """Returns logits whose softmax is drawn from: adjusted, tempered and truncated; for greedy rows, adjusted."""
        own, logits = self.own, self._by_rows(self.adjusted(flat))
        weights = truncate(weights_of(logits, own.temperature), own)
        return jnp.where(self.random[:, None, None], jnp.log(weights), logits).reshape(flat.shape)

    def _by_rows(self, flat: Float[Array, "*n vocab"]) -> Float[Array, "rows H vocab"]:
        return flat.reshape(*self.index.shape, -1)


def own_rows(part: Shaped[Array, "rows part"]) -> Shaped[Array, "own vocab"]:
    """Exchanges a part of the vocabulary for all rows for the whole vocabulary of this device's rows."""
    return lax.all_to_all(part, TENSOR, split_axis=0, concat_axis=1, tiled=True)


def count_tokens(
    counts: Int[Array, "seats vocab"], seat: Int[Array, "rows H"], tokens: Int[Array, "rows H"]
) -> Int[Array, "seats vocab"]:
    """One more of each token at its seat; past the last seat nothing is counted.

    On several devices each counts the tokens of its part of the vocabulary, where that divides evenly.
    """
    mesh = axis_mesh()
    if mesh is None or counts.shape[1] % mesh.shape[TENSOR]:
        return counts.at[seat, tokens].add(1, mode="drop")

    def on_each_device(
        part: Int[Array, "seats part"], seat: Int[Array, "rows H"], tokens: Int[Array, "rows H"]
    ) -> Int[Array, "seats part"]:
        place = tokens - axis_index() * part.shape[1]
        mine = (place >= 0) & (place < part.shape[1])
        return part.at[jnp.where(mine, seat, part.shape[0]), place].add(1, mode="drop")

    own = P(None, TENSOR)
    divided = jax.shard_map(on_each_device, mesh=mesh, in_specs=(own, P(), P()), out_specs=own, check_vma=False)
    return divided(counts, seat, tokens)
