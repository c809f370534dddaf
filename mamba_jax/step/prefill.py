"""The prefill rows of a step: packed rows of any length, which write states at tile ends and may emit a token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.slots import read_slots
from mamba_jax.batch import PrefillBatch, PromptLogprobs
from mamba_jax.layout import Hidden, PrefillLayout
from mamba_jax.model import HybridModel
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission, report_logprobs
from mamba_jax.step.slots import Resumption, SampledRows, StepHidden, shared_writes, write_hidden, wrong_tags
from mamba_jax.store import Store


@dataclass(frozen=True)
class PrefillRows:
    """R rows, whose tokens are packed one after the other."""

    batch: PrefillBatch
    layout: PrefillLayout
    page_table: Int[Array, "rows pages"]
    has_anchors: bool
    tokens: Int[Array, " T"]
    row_id: Int[Array, " rows"]
    length: Int[Array, " rows"]
    """Tokens committed before the step."""
    sampled: SampledRows

    @classmethod
    def of(cls, store: Store, rows: Rows, batch: PrefillBatch, page_table: Int[Array, "rows pages"]) -> Self:
        """Returns the rows of a batch."""
        layout = PrefillLayout.of(
            num_packed=batch.tokens.shape[0], tile_size=batch.tile_size, length=batch.length,
            num_tokens=batch.num_tokens, read_slot=batch.read_slot, tile_write_slot=batch.tile_write_slot,
            page_table=page_table, most_writes=batch.most_writes,
        )  # fmt: skip
        after = batch.length + batch.num_tokens
        none = jnp.zeros((after.shape[0], 0), jnp.int32)
        sampled = SampledRows(batch.row_id, batch.sample, none, jnp.zeros_like(after), after)
        has_anchors = rows.anchor is not None
        return cls(batch, layout, page_table, has_anchors, batch.tokens, batch.row_id, batch.length, sampled)

    def write(self, store: Store, hidden: Hidden, *, for_drafts: bool) -> tuple[Store, StepHidden]:
        """Completes the slots that the sublayers have written."""
        layout, packed = self.layout, self.layout.packed
        wrong = wrong_tags(store, self.row_id, self.length, self.batch.read_slot)
        wrong |= shared_writes(store, layout.read_slot, packed.tiles.write_slot, packed.tile_row)
        before = read_slots(store.hidden, layout.read_slot)
        # As in `DecodeRows.write`, what is written must depend on what was read.
        hidden = jnp.where(layout.valid[:, None], hidden, before[packed.token_row].astype(hidden.dtype))
        tile_last = jnp.maximum(packed.row_start[packed.tile_row] + packed.tile_end - 1, 0)
        tag = jnp.where(wrong[packed.tile_row], -1, self.length[packed.tile_row] + packed.tile_end)
        store = write_hidden(store, hidden[tile_last], packed.tiles.write_slot, tag)
        return store, StepHidden(hidden, before, wrong)

    def heads(self, hidden: Hidden) -> Float[Array, "rows 1 hidden"]:
        """Returns the hidden states that tokens are chosen from."""
        return hidden[jnp.maximum(self.layout.packed.row_start + self.batch.num_tokens - 1, 0)][:, None]

    def kept(self, emission: Emission) -> Int[Array, " rows"]:
        """Returns how many tokens of each row stay: all."""
        return self.batch.num_tokens

    def resume_after(self, kept: Int[Array, " rows"]) -> Resumption:
        """Returns the slot of a row's last tile; rows without tokens have no tile and keep the slot that they read."""
        packed, slot = self.layout.packed, jnp.asarray(self.batch.read_slot)
        end_tile = (packed.tile_end == kept[packed.tile_row]) & (packed.tile_end > 0)
        end_row = jnp.where(end_tile, packed.tile_row, slot.shape[0])
        slot = slot.at[end_row].set(packed.tiles.write_slot, mode="drop")
        return slot, self.length + kept if self.has_anchors else None

    def num_proposed(self, most: int) -> int:
        """Returns the number of drafts to make."""
        return most

    def report(self, model: HybridModel, rows: Rows, written: StepHidden, max_logprobs: int) -> dict[str, Any]:
        """Returns the fields of `StepOutput` that only prefill steps have."""
        given = rows, self.batch, self.layout, written.hidden, written.before
        return {"prompt_logprobs": prompt_logprobs(model.logits, *given, max_logprobs)}


_PIECE = 64
"""Tokens that go through the head at once."""


def prompt_logprobs(
    logits: Callable[[Array, Array | None], Array],
    rows: Rows,
    batch: PrefillBatch,
    layout: PrefillLayout,
    hidden: Float[Array, "T hidden"],
    before: Float[Array, "rows hidden"],
    most: int,
) -> PromptLogprobs:
    """Log-probability of every token, and of the ids that its row asks for, given those before it, for rows that ask.

    The hidden state before a row's first token is in the slot that the row has read, so that a chunk need not know
    the token after its last one. Pieces of tokens go through the head one by one, and only those that are asked for.
    """
    count, row = batch.tokens.shape[0], layout.packed.token_row
    first = jnp.arange(count) == layout.packed.row_start[row]
    previous = jnp.where(first[:, None], before[row].astype(hidden.dtype), jnp.roll(hidden, 1, axis=0))
    asked = jnp.where(batch.row_id > 0, rows.sampling.prompt_logprobs[batch.row_id], -1)
    wanted, seat = jnp.where(layout.valid, asked[row], -1), batch.row_id[row]

    def piece(args: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        previous, tokens, wanted, seat = args

        def through_head() -> tuple[Array, Array, Array, Array]:
            ids = rows.sampling.prompt_logprob_ids[seat]
            adapter = None if rows.adapter is None else rows.adapter[seat]
            return report_logprobs(logits(previous, adapter), tokens, wanted, others=ids, most=most)

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
