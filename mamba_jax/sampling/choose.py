"""Choosing tokens and verifying drafts.

Head j of a row has the logits after the row's certain tokens and drafts 0..j-1. Every head chooses its token without
regard to the drafts: the argmax, or a draw from its distribution p. Drafts are accepted from the left while they equal
the chosen tokens; the first different choice is the new token. A draft x that does not depend on the draw is accepted
with probability p(x), the maximum for one-hot proposals (Leviathan et al. 2023). Draws are keyed by position, so a
seeded row emits the same tokens with any drafts, or none.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt8

from kernels_pallas.fixed_order import log_sum_exp
from mamba_jax.sampling.draw_tokens import draw
from mamba_jax.sampling.largest import argmax, largest, most_likely
from mamba_jax.sampling.logits import SamplingInputs, own_rows
from mamba_jax.sampling.masks import bit_of
from mamba_jax.sampling.table import DEFAULT_LOGPROBS
from mamba_jax.sharding.axis import TENSOR, axis_mesh, keep_whole


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
    supports: UInt8[Array, "rows H bytes"] | None = None
    """The tokens that each head's token could have been, as `pack_bits` packs them; None unless they are reported."""


def choose(
    logits: Float[Array, "rows H vocab"], asked: SamplingInputs, *, supports: bool = False, greedy: bool = False
) -> Emission:
    """Verifies drafts and draws one new token for each row.

    Args:
        logits: float32; on several devices they may be divided by the vocabulary.
        supports: report the tokens that could have been drawn, for rows whose `sampling_mask` is set.
        greedy: choose the largest logit in every row, whatever its parameters: a smaller program.
    """
    sample = asked.sample
    if supports:
        asked = replace(asked, supports=sample & asked.table.sampling_mask[asked.row_id])
    drafts, heads = asked.drafts, jnp.arange(logits.shape[1])

    # Flat, as the product returns them: a TPU would change the layout by rows and heads.
    flat = logits.reshape(-1, logits.shape[-1])

    def greedily(flat: Float[Array, "n vocab"]) -> Chosen:
        tokens, finite = largest(flat)
        return tokens, _no_supports(flat, asked), finite

    anything = (asked.masked | asked.biased | asked.penalized | asked.random).any()
    chosen = greedily(flat) if greedy else lax.cond(anything, lambda flat: _by_rows(flat, asked), greedily, flat)
    tokens, drawable, finite = (each.reshape(*logits.shape[:-1], *each.shape[1:]) for each in chosen)
    only = bit_of(tokens, logits.shape[-1]) if supports else drawable
    drawable = jnp.where(asked.random[:, None, None], drawable, only)
    accepted = jnp.cumprod(tokens[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    accepted = jnp.where(sample, accepted, 0)
    last = accepted[:, None]
    new = jnp.take_along_axis(tokens, last, axis=1)
    padded = jnp.concatenate([drafts, jnp.full_like(new, -1)], axis=1)
    emitted = jnp.where(heads < last, padded, jnp.where(heads == last, new, -1))
    return Emission(
        tokens=jnp.where(sample[:, None], emitted, -1), count=jnp.where(sample, accepted + 1, 0), accepted=accepted,
        finite=finite, supports=drawable if supports else None,
    )  # fmt: skip


Chosen = tuple[Int[Array, " n"], UInt8[Array, "n bytes"], Bool[Array, " n"]]
"""Of rows and heads: the tokens, those that each could have been in rows that draw, and whether all logits are
finite."""


def _no_supports(flat: Float[Array, "n vocab"], asked: SamplingInputs) -> UInt8[Array, "n bytes"]:
    return jnp.zeros((flat.shape[0], 0 if asked.supports is None else -(-flat.shape[1] // 8)), jnp.uint8)


def _by_rows(flat: Float[Array, "n vocab"], asked: SamplingInputs) -> Chosen:
    """Chooses by all of a row's options.

    On several devices each samples its share of the rows, if rows and vocabulary divide evenly; otherwise each samples
    all of them. Both choose the same tokens, because no operation crosses rows.
    """
    mesh = axis_mesh()
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    if mesh is None or asked.row_id.shape[0] % shards or flat.shape[-1] % shards:
        return _chosen(keep_whole(flat), asked)

    arrays = {field.name: getattr(asked, field.name) for field in fields(asked) if field.name != "all_seats"}
    specs = {name: P(None, TENSOR) if name in ("output_counts", "prompt_seen") else P() for name in arrays}

    def on_each_device(part: Float[Array, "n part"], arrays: dict[str, Any]) -> Chosen:
        here = replace(asked, **arrays).on_this_device()
        chosen: Chosen = jax.tree.map(
            lambda each: lax.all_gather(each, TENSOR, tiled=True), _chosen(own_rows(part), here)
        )
        return chosen

    chosen: Chosen = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(P(None, TENSOR), specs),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )(flat, arrays)
    return chosen


def _chosen(flat: Float[Array, "n vocab"], asked: SamplingInputs) -> Chosen:
    random = jnp.repeat(asked.random, asked.index.shape[1])

    def drawn(flat: Array) -> tuple[Array, Array]:
        tokens, supports = draw(flat, asked)
        return jnp.where(random, tokens, argmax(flat)), supports

    def likeliest(flat: Array) -> tuple[Array, Array]:
        return argmax(flat), _no_supports(flat, asked)

    def with_finite(choice: Callable[[Array], tuple[Array, Array]]) -> Callable[[Array], Chosen]:
        return lambda flat: (*choice(flat), jnp.isfinite(flat).all(axis=-1))

    def unchanged(flat: Array) -> Chosen:
        return lax.cond(random.any(), with_finite(drawn), with_finite(likeliest), flat)

    changed = with_finite(lambda flat: lax.cond(random.any(), drawn, likeliest, asked.adjusted(flat)))

    # One program for both would copy the logits also where nothing changes them. Compiling two would take longer than
    # that on a CPU.
    def by_need(flat: Array) -> Chosen:
        return lax.cond(asked.adjusts, changed, unchanged, flat)

    return lax.platform_dependent(flat, cpu=changed, default=by_need)


def report_logprobs(
    logits: Float[Array, "*rows vocab"],
    tokens: Int[Array, "*rows"],
    wanted: Int[Array, "*rows"],
    process: Callable[[Array], Array] = lambda logits: logits,
    others: Int[Array, "*rows ids"] | None = None,
    most: int = DEFAULT_LOGPROBS,
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows top"], Float[Array, "*rows top"], Float[Array, "*rows ids"]]:
    """Log-probabilities of tokens and of the most likely alternatives, computed only where some row wants them.

    Args:
        logits: float32, as the model gave them; on several devices they may be divided by the vocabulary.
        tokens: -1 for none.
        wanted: number of alternatives; -1 to report nothing.
        process: function applied to the logits first.
        others: ids of more tokens to report; -1 for none.
        most: maximum number of alternatives.
    Returns:
        token log-probabilities, ids of the alternatives, their log-probabilities, those of `others` (undefined for -1).
    """
    top = min(most, logits.shape[-1])
    others = jnp.zeros((*tokens.shape, 0), jnp.int32) if others is None else others

    def nothing():
        ids, best = jnp.zeros((*tokens.shape, top), jnp.int32), jnp.zeros((*tokens.shape, top))
        return jnp.zeros(tokens.shape), ids, best, jnp.zeros(others.shape)

    def something():
        shown = process(keep_whole(logits))
        normalizer = log_sum_exp(shown)

        def of(ids: Int[Array, "*rows n"]) -> Float[Array, "*rows n"]:
            return jnp.take_along_axis(shown, jnp.maximum(ids, 0), axis=-1) - normalizer

        def alternatives():
            best, ids = most_likely(shown, top)
            return ids, best - normalizer

        def likeliest():
            # What evaluation harnesses ask for. The other columns are not read.
            ids = jnp.broadcast_to(argmax(shown)[..., None], (*tokens.shape, top))
            return ids, of(ids[..., :1]) * jnp.ones(top)

        forms = lambda: nothing()[1:3], likeliest, alternatives
        ids, best = lax.switch(jnp.clip(wanted.max(initial=0), 0, 2), forms)
        return of(tokens[..., None])[..., 0], ids, best, of(others)

    return lax.cond((wanted >= 0).any(), something, nothing)
