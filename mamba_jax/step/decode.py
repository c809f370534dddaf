"""The decode rows of a step: each feeds certain tokens and drafts, and emits the right drafts and one more token.

They have two forms. `DecodeRows` write a state after each token of the step. `ReplayRows` keep an anchor and the inputs
since, and write a state only where the step reaches a multiple of the interval (`mamba_jax.store`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.slots import read_slots
from kernels_pallas.tails import read_ring
from mamba_jax.batch import DecodeBatch
from mamba_jax.layout import DecodeLayout, Hidden, ReplayLayout
from mamba_jax.model import HybridModel
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission
from mamba_jax.step.slots import (
    Resumption,
    SampledRows,
    StepHidden,
    shared_writes,
    write_hidden,
    wrong_tags,
    wrong_tails,
)
from mamba_jax.store import Store


@dataclass(frozen=True)
class DecodeRows:
    """D rows of `width` tokens; head j of a row follows its last certain token and j drafts."""

    layout: DecodeLayout
    length: Int[Array, " rows"]
    """Tokens committed before the step."""
    num_tokens: Int[Array, " rows"]
    read_slot: Int[Array, " rows"]
    """Where the state before the step, or the anchor, is."""
    row_id: Int[Array, " rows"]
    by_row: Int[Array, "rows width"]
    """The tokens; -1 for a draft that is always rejected."""
    certain: Int[Array, " rows"]
    """Tokens that are no drafts."""
    sampled: SampledRows
    page_table: Int[Array, "rows pages"]

    @staticmethod
    def of(store: Store, rows: Rows, batch: DecodeBatch, page_table: Int[Array, "rows pages"]) -> "DecodeRows":
        """Returns the rows of a batch, in the form of the store. Rows that continue read the slots of their seats."""
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
        places: dict[str, Any] = {"length": length, "num_tokens": num_tokens, "page_table": page_table}
        places["read_slot"] = jnp.where(batch.continues, rows.slot[row_id], batch.read_slot)
        more: dict[str, Any] = {"row_id": row_id, "by_row": tokens, "certain": certain, "sampled": sampled}
        if store.tails is None:
            return DecodeRows(DecodeLayout.of(**places, write_slot=batch.write_slot), **places, **more)
        assert rows.anchor is not None
        assert batch.anchor is not None
        layout = ReplayLayout.from_anchor(
            **places, write_slot=batch.write_slot, tail_id=row_id, steps=width, interval=store.tails.interval,
            anchor=jnp.where(batch.continues, rows.anchor[row_id], batch.anchor),
        )  # fmt: skip
        return ReplayRows(layout, **places, **more)

    @property
    def tokens(self) -> Int[Array, " T"]:
        return jnp.maximum(self.by_row, 0).reshape(-1)

    def write(self, store: Store, hidden: Hidden, *, for_drafts: bool) -> tuple[Store, StepHidden]:
        """Completes the slots that the sublayers have written."""
        wrong = self.wrong(store)
        # A draft source reads the hidden state before every row's first token.
        before = self.hidden_before(store, all_rows=for_drafts)
        # A row without tokens finds its slot's hidden state where its first token's would be. (All padding gets it, so
        # that what is written depends on what was read. Without an order the compiler would copy the store.)
        read = jnp.repeat(before, self.by_row.shape[1], axis=0).astype(hidden.dtype)
        hidden = jnp.where(self.layout.valid[:, None], hidden, read)
        return self.complete(store, hidden, wrong, for_drafts=for_drafts), StepHidden(hidden, before, wrong)

    def wrong(self, store: Store) -> Bool[Array, " rows"]:
        """With `debug_state`: rows whose slots have unexpected tags, or that share a slot to write."""
        writer = jnp.repeat(jnp.arange(self.row_id.shape[0]), self.layout.shape[1])
        wrong = wrong_tags(store, self.row_id, self.length, self.read_slot)
        return wrong | shared_writes(store, self.layout.read_slot, self.layout.write_slot.reshape(-1), writer)

    def hidden_before(self, store: Store, *, all_rows: bool) -> Float[Array, "rows hidden"]:
        """Returns the hidden state in the slots, of `all_rows` or only of those that feed no token."""
        slot = self.read_slot if all_rows else jnp.where(self.num_tokens == 0, self.read_slot, 0)
        return read_slots(store.hidden, slot)

    def complete(self, store: Store, hidden: Hidden, wrong: Bool[Array, " rows"], *, for_drafts: bool) -> Store:
        """Writes the hidden states and debugging tags of the states that the sublayers wrote."""
        tag = jnp.where(jnp.repeat(wrong, self.layout.shape[1]), -1, self.layout.positions + 1)
        return write_hidden(store, hidden, self.layout.write_slot.reshape(-1), tag)

    def heads(self, hidden: Hidden) -> Float[Array, "rows H hidden"]:
        """Returns the hidden states that tokens are chosen from."""
        width = self.by_row.shape[1]
        by_row = hidden.reshape(-1, width, hidden.shape[-1])
        at = jnp.clip(self.certain[:, None] - 1 + jnp.arange(width), 0, width - 1)
        return by_row if width == 1 else jnp.take_along_axis(by_row, at[..., None], axis=1)

    def kept(self, emission: Emission) -> Int[Array, " rows"]:
        """Returns how many of the fed tokens stay."""
        return jnp.where(self.num_tokens > 0, self.certain + emission.accepted, 0)

    def resume_after(self, kept: Int[Array, " rows"]) -> Resumption:
        """Returns where each row continues after `kept` of its tokens."""
        written = jnp.take_along_axis(self.layout.write_slot, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(kept > 0, written, self.read_slot), None

    def num_proposed(self, most: int) -> int:
        """Returns the number of drafts to make, at most as many as the step has room for (at least one).

        After a step that verifies none, few are made, so that drafting costs less than the step.
        """
        return min(most, max(self.by_row.shape[1] - 1, 1))

    def report(self, model: HybridModel, rows: Rows, written: StepHidden, _: int) -> dict[str, Any]:
        """Returns the fields of `StepOutput` that only decode steps have."""
        return {"num_drafts": self.sampled.num_drafts if self.by_row.shape[1] > 1 else None, "prompt_logprobs": None}


@dataclass(frozen=True)
class ReplayRows(DecodeRows):
    """Rows that keep an anchor, and the inputs since in their tails."""

    layout: ReplayLayout

    def wrong(self, store: Store) -> Bool[Array, " rows"]:
        """As for `DecodeRows`; also rows whose tails lack tokens since the anchor."""
        layout, places = self.layout, self.layout.anchored
        wrong = wrong_tags(store, self.row_id, places.anchor_length, self.read_slot) | wrong_tails(store, layout)
        return wrong | shared_writes(store, layout.read_slot, places.due_slot, jnp.arange(self.row_id.shape[0]))

    def hidden_before(self, store: Store, *, all_rows: bool) -> Float[Array, "rows hidden"]:
        """As of `DecodeRows`; from the tail where the row has absorbed tokens since its anchor."""
        anchored = super().hidden_before(store, all_rows=all_rows)
        if not all_rows:
            return anchored
        assert store.tails is not None
        last = read_ring(store.tails.hidden, self.layout.anchored.tail_id, self.length[:, None] - 1)[:, 0]
        return jnp.where((self.length > self.layout.anchored.anchor_length)[:, None], last, anchored)

    def complete(self, store: Store, hidden: Hidden, wrong: Bool[Array, " rows"], *, for_drafts: bool) -> Store:
        """Writes the hidden state and tag of each state that is due, and the step's tokens' into the tails.

        The tails hold hidden states only `for_drafts`.
        """
        layout, places, tails = self.layout, self.layout.anchored, store.tails
        assert tails is not None
        by_row = hidden.reshape(*layout.shape, -1)
        nth = jnp.minimum(places.boundary - places.length - 1, by_row.shape[1] - 1)
        due = jnp.take_along_axis(by_row, nth[:, None, None], axis=1)[:, 0]
        store = write_hidden(store, due, places.due_slot, jnp.where(wrong, -1, places.boundary))
        if for_drafts:
            tails = dataclasses.replace(tails, hidden=layout.append(tails.hidden, by_row.astype(tails.hidden.dtype)))
        if tails.tags is not None:
            tag = jnp.where(jnp.repeat(wrong, by_row.shape[1]), -1, layout.positions).reshape(layout.shape)
            tails = dataclasses.replace(tails, tags=layout.append(tails.tags, tag))
        return dataclasses.replace(store, tails=tails)

    def resume_after(self, kept: Int[Array, " rows"]) -> Resumption:
        """Returns slots and anchors of the rows; anchors move where kept tokens reach a multiple of the interval."""
        places = self.layout.anchored
        moved = (kept > 0) & (places.boundary <= self.length + kept)
        slot = jnp.where(moved, places.write_slot, self.read_slot)
        return slot, jnp.where(moved, places.boundary, places.anchor_length)
