"""What sampling parameters do to logits [rows, H, vocab], in vLLM's order: bias and held-back ids, penalties,
temperature, min-p, top-k, top-p.

Each step runs only where some row asks for it. A row that does not ask keeps its logits bit by bit.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from mamba_jax.sampling.table import SamplingTable

Logits = Float[Array, "rows H vocab"]


def add_bias(logits: Logits, table: SamplingTable, output_index: Int[Array, "rows H"]) -> Logits:
    """Adds `logit_bias`, then holds back `stop_ids` where fewer than `min_tokens` tokens have come out."""
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, :, _drop(table.bias_ids, logits)].add(table.bias_values[:, :, None], mode="drop")
    early = output_index < table.min_tokens[:, None]
    held = jnp.where(early[:, None, :], _drop(table.stop_ids, logits)[:, :, None], logits.shape[-1])
    heads = jnp.arange(logits.shape[1])
    return logits.at[rows[:, :, None], heads, held].set(-jnp.inf, mode="drop")


def _drop(ids: Int[Array, "rows n"], logits: Logits) -> Int[Array, "rows n"]:
    """Ids with padding moved past the vocabulary, where scatters drop it: negative indices count from the end."""
    return jnp.where(ids < 0, logits.shape[-1], ids)


def penalise(
    logits: Logits,
    table: SamplingTable,
    output_counts: Int[Array, "rows vocab"],
    prompt_seen: Bool[Array, "rows vocab"],
    drafts: Int[Array, "rows H-1"],
) -> Logits:
    """Repetition penalty for tokens of prompt and output, frequency and presence penalties for tokens of the output.

    Logits j stand after drafts 0..j-1, so those count as output too.
    """
    counts = jnp.broadcast_to(output_counts[:, None, :], logits.shape)
    if drafts.shape[1]:
        rows, heads = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]
        before = (jnp.arange(drafts.shape[1]) < heads) & (drafts[:, None, :] >= 0)
        counts = counts.at[rows, heads, jnp.where(before, drafts[:, None, :], logits.shape[-1])].add(1, mode="drop")
    repetition = table.repetition_penalty[:, None, None]
    factor = jnp.where((counts > 0) | prompt_seen[:, None, :], repetition, 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - table.frequency_penalty[:, None, None] * counts
    return logits - jnp.where(counts > 0, table.presence_penalty[:, None, None], 0.0)


def has_bias(table: SamplingTable) -> Bool[Array, " rows"]:
    """Which rows `add_bias` may concern."""
    return (table.bias_ids[:, 0] >= 0) | (table.min_tokens > 0)


def has_penalties(table: SamplingTable) -> Bool[Array, " rows"]:
    """Which rows `penalise` concerns."""
    return (table.repetition_penalty != 1) | (table.frequency_penalty != 0) | (table.presence_penalty != 0)


def truncate(logits: Logits, table: SamplingTable) -> Logits:
    """Sets to -inf what min-p, top-k and top-p leave out, one after the other; ties at a limit all stay."""
    random = table.temperature > 0
    min_p, top_k, top_p = (
        jnp.where(random, wanted, off)[:, None, None]
        for wanted, off in ((table.min_p, 0.0), (table.top_k, 0), (table.top_p, 1.0))
    )

    def by_min_p(logits: Logits) -> Logits:
        least = logits.max(-1, keepdims=True) + jnp.log(min_p)  # log 0 = -inf leaves nothing out
        return jnp.where(logits < least, -jnp.inf, logits)

    def by_top_k(logits: Logits) -> Logits:
        key = _sortable(logits)
        least = _largest(key, lambda over: over.sum(-1, keepdims=True, dtype=jnp.int32) >= top_k)
        return jnp.where((top_k > 0) & (key < least), -jnp.inf, logits)

    def by_top_p(logits: Logits) -> Logits:
        key = _sortable(logits)
        weight = jnp.exp(logits - logits.max(-1, keepdims=True))
        # At least the most likely token stays, however small top_p is.
        wanted = jnp.maximum(top_p * weight.sum(-1, keepdims=True), jnp.finfo(weight.dtype).tiny)
        least = _largest(key, lambda over: jnp.where(over, weight, 0.0).sum(-1, keepdims=True) >= wanted)
        return jnp.where((top_p < 1) & (key < least), -jnp.inf, logits)

    for asked, limit in ((min_p > 0, by_min_p), (top_k > 0, by_top_k), (top_p < 1, by_top_p)):
        logits = lax.cond(asked.any(), limit, lambda logits: logits, logits)
    return logits


def _sortable(x: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Unsigned integers in the order of the float32 `x`."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(key: UInt[Array, "*shape vocab"], enough) -> UInt[Array, "*shape 1"]:
    """The largest t for which the tokens with key >= t are `enough`, found bit by bit: 32 passes, and no sort."""

    def with_bit(i, least):
        higher = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(key >= higher), higher, least)

    return lax.fori_loop(0, 32, with_bit, jnp.zeros((*key.shape[:-1], 1), jnp.uint32))
