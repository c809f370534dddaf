"""The decode rows of a step: each feeds certain tokens and drafts, and emits the right drafts and one more token."""

from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.batch import DecodeBatch
from mamba_jax.layout import DecodeLayout, Hidden
from mamba_jax.model import HybridModel
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission
from mamba_jax.step.heads import SampledRows, StepHidden
from mamba_jax.step.running_rows import ReplayRows, Resumption, SnapshotRows, running_rows
from mamba_jax.store import Store


@dataclass(frozen=True)
class DecodeRows:
    """D rows of `width` tokens; head j of a row follows its last certain token and j drafts."""

    running: SnapshotRows | ReplayRows
    row_id: Int[Array, " rows"]
    by_row: Int[Array, "rows width"]
    """The tokens; -1 for a draft that is always rejected."""
    certain: Int[Array, " rows"]
    """Tokens that are no drafts."""
    sampled: SampledRows
    page_table: Int[Array, "rows pages"]

    @classmethod
    def of(cls, store: Store, rows: Rows, batch: DecodeBatch, page_table: Int[Array, "rows pages"]) -> Self:
        """Returns the rows of a batch."""
        row_id, width = batch.row_id, batch.tokens.shape[1]
        # The seat's values apply if the host has not seen the last step's result yet.
        own = jnp.concatenate([rows.last_token[:, None], rows.drafts], axis=1)[row_id, :width]
        tokens = jnp.where(batch.continues[:, None], own, batch.tokens)
        length = jnp.where(batch.continues, rows.length[row_id], batch.length)
        certain = batch.num_tokens - batch.num_drafts
        num_drafts, num_tokens = batch.num_drafts, batch.num_tokens
        if width > 1:
            # The host plans for the maximum number of drafts; the seat may have fewer.
            made = jnp.cumprod(own[:, 1:] >= 0, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
            num_drafts = jnp.where(batch.continues, jnp.minimum(num_drafts, made), num_drafts)
            if store.rounded is not None:
                # A step ends where the state is rounded, because later tokens continue from the rounded state.
                left = store.rounded.every - length % store.rounded.every
                num_drafts = jnp.clip(left - certain, 0, num_drafts)
            num_tokens = certain + num_drafts
        after = certain[:, None] + jnp.arange(width - 1)
        sampled = SampledRows(
            row_id=row_id,
            sample=batch.sample,
            drafts=jnp.take_along_axis(tokens, jnp.clip(after, 0, width - 1), axis=1),
            num_drafts=num_drafts,
            length=length + certain,
        )
        running = running_rows(store, rows, batch, length=length, num_tokens=num_tokens, page_table=page_table)
        return cls(running, row_id, tokens, certain, sampled, page_table)

    @property
    def layout(self) -> DecodeLayout:
        return self.running.layout

    @property
    def tokens(self) -> Int[Array, " T"]:
        return jnp.maximum(self.by_row, 0).reshape(-1)

    @property
    def length(self) -> Int[Array, " rows"]:
        """Tokens committed before the step."""
        return self.running.length

    def write(self, store: Store, hidden: Hidden, *, for_drafts: bool) -> tuple[Store, StepHidden]:
        """Completes the slots that the sublayers have written."""
        wrong = self.running.wrong(store, self.row_id)
        # A draft source reads the hidden state before every row's first token.
        before = self.running.hidden_before(store, all_rows=for_drafts)
        # A row without tokens finds its slot's hidden state where its first token's would be. (All padding gets it, so
        # that what is written depends on what was read. Without an order the compiler would copy the store.)
        read = jnp.repeat(before, self.by_row.shape[1], axis=0).astype(hidden.dtype)
        hidden = jnp.where(self.layout.valid[:, None], hidden, read)
        return self.running.write(store, hidden, wrong, for_drafts=for_drafts), StepHidden(hidden, before, wrong)

    def heads(self, hidden: Hidden) -> Float[Array, "rows H hidden"]:
        """Returns the hidden states that tokens are chosen from."""
        width = self.by_row.shape[1]
        by_row = hidden.reshape(-1, width, hidden.shape[-1])
        at = jnp.clip(self.certain[:, None] - 1 + jnp.arange(width), 0, width - 1)
        return by_row if width == 1 else jnp.take_along_axis(by_row, at[..., None], axis=1)

    def kept(self, emission: Emission) -> Int[Array, " rows"]:
        """Returns how many of the fed tokens stay."""
        return jnp.where(self.running.num_tokens > 0, self.certain + emission.accepted, 0)

    def resume_after(self, kept: Int[Array, " rows"]) -> Resumption:
        """Returns where each row continues."""
        return self.running.resume_after(kept)

    def num_proposed(self, most: int) -> int:
        """Returns the number of drafts to make, at most as many as the step has room for (at least one).

        After a step that verifies none, few are made, so that drafting costs less than the step.
        """
        return min(most, max(self.by_row.shape[1] - 1, 1))

    def report(self, model: HybridModel, rows: Rows, written: StepHidden, _: int) -> dict[str, Any]:
        """Returns the fields of `StepOutput` that only decode steps have."""
        return {"num_drafts": self.sampled.num_drafts if self.by_row.shape[1] > 1 else None, "prompt_logprobs": None}
