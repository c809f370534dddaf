"""Applies sampling parameters to logits [rows, H, vocab], in vLLM's order: bias and held-back ids, penalties,
temperature, min-p, top-k, top-p.

Each step runs only if some row needs it, and replaces its input, so that only one array of the vocabulary's size
exists. The logits of other rows stay bitwise equal. From temperature on, tokens have weights instead of logits.
"""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.fixed_order import exp, quotient, rounded, row_max, row_sum
from mamba_jax.sampling.table import SamplingTable

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
