"""Log-probabilities of a prompt's own tokens and of given ids, from a prefill step's hidden states."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mamba_jax.batch import PrefillBatch, PromptLogprobs
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.rows import Rows
from mamba_jax.sampling import report_logprobs

_PIECE = 64
"""Tokens that go through the head at once."""


def prompt_logprobs(
    logits: Callable[[Array], Array],
    rows: Rows,
    batch: PrefillBatch,
    layout: PrefillLayout,
    hidden: Float[Array, "T hidden"],
    before: Float[Array, "rows hidden"],
) -> PromptLogprobs:
    """Log-probability of every token, and of the ids that its row asks for, given those before it, for rows that ask.

    The hidden state before a row's first token is in the slot that the row has read, so that a chunk need not know
    the token after its last one. Pieces of tokens go through the head one by one, and only those that are asked for.
    """
    count = batch.tokens.shape[0]
    first = jnp.arange(count) == layout.row_start[layout.token_row]
    previous = jnp.where(first[:, None], before[layout.token_row].astype(hidden.dtype), jnp.roll(hidden, 1, axis=0))
    asked = jnp.where(batch.row_id > 0, rows.sampling.prompt_logprobs[batch.row_id], -1)
    wanted = jnp.where(layout.valid, asked[layout.token_row], -1)
    seat = batch.row_id[layout.token_row]

    def piece(args: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        previous, tokens, wanted, seat = args

        def through_head() -> tuple[Array, Array, Array, Array]:
            ids = rows.sampling.prompt_logprob_ids[seat]
            return report_logprobs(logits(previous), tokens, wanted, others=ids)

        def nothing() -> tuple[Array, Array, Array, Array]:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(through_head))

        return lax.cond((wanted >= 0).any(), through_head, nothing)

    size = min(_PIECE, count)
    pieces = -(-count // size)

    def cut(x: Array) -> Array:
        return jnp.pad(x, [(0, pieces * size - count)] + [(0, 0)] * (x.ndim - 1)).reshape(pieces, size, *x.shape[1:])

    wanted = jnp.pad(wanted, (0, pieces * size - count), constant_values=-1).reshape(pieces, size)
    reported = lax.map(piece, (cut(previous), cut(batch.tokens), wanted, cut(seat)))
    return PromptLogprobs(*(x.reshape(pieces * size, *x.shape[2:])[:count] for x in reported))
