"""The two forms of a decoding row, with the same methods: which state it reads, writes and continues from.

`SnapshotRows` write a state after each token of the step. `ReplayRows` keep an anchor and the inputs since, and write a
state only where the step reaches a multiple of the interval (`mamba_jax.store`).
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.slots import read_slots
from kernels_pallas.tails import read_ring
from mamba_jax.batch import DecodeBatch
from mamba_jax.layout.base import Hidden
from mamba_jax.layout.decode import DecodeLayout, ReplayLayout
from mamba_jax.rows import Rows
from mamba_jax.step.slots import shared_writes, write_hidden, wrong_tags, wrong_tails
from mamba_jax.store import Store

Resumption = tuple[Int[Array, " rows"], Int[Array, " rows"] | None]
"""The slot that each row reads next and, under replay, how many tokens the state in it has absorbed."""


@dataclass(frozen=True)
class _RunningRows:
    length: Int[Array, " rows"]
    num_tokens: Int[Array, " rows"]
    read_slot: Int[Array, " rows"]
    """Where the state before the step, or the anchor, is."""

    def hidden_before(self, store: Store, *, all_rows: bool) -> Float[Array, "rows hidden"]:
        """Returns the hidden state in the slots, of `all_rows` or only of those that feed no token."""
        slot = self.read_slot if all_rows else jnp.where(self.num_tokens == 0, self.read_slot, 0)
        return read_slots(store.hidden, slot)


@dataclass(frozen=True)
class SnapshotRows(_RunningRows):
    """Rows that write a state after each token."""

    layout: DecodeLayout

    def wrong(self, store: Store, row_id: Int[Array, " rows"]) -> Bool[Array, " rows"]:
        """With `debug_state`: rows whose slots have unexpected tags, or that share a slot to write."""
        writer = jnp.repeat(jnp.arange(row_id.shape[0]), self.layout.shape[1])
        wrong = wrong_tags(store, row_id, self.length, self.read_slot)
        return wrong | shared_writes(store, self.layout.read_slot, self.layout.write_slot.reshape(-1), writer)

    def write(self, store: Store, hidden: Hidden, wrong: Bool[Array, " rows"], *, for_drafts: bool) -> Store:
        """Writes the hidden states and debugging tags of the states that the sublayers wrote."""
        tag = jnp.where(jnp.repeat(wrong, self.layout.shape[1]), -1, self.layout.positions + 1)
        return write_hidden(store, hidden, self.layout.write_slot.reshape(-1), tag)

    def resume_after(self, kept: Int[Array, " rows"]) -> Resumption:
        """Where each row continues after `kept` of its tokens."""
        written = jnp.take_along_axis(self.layout.write_slot, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(kept > 0, written, self.read_slot), None


@dataclass(frozen=True)
class ReplayRows(_RunningRows):
    """Rows that keep an anchor, and the inputs since in their tails."""

    layout: ReplayLayout

    def wrong(self, store: Store, row_id: Int[Array, " rows"]) -> Bool[Array, " rows"]:
        """As for `SnapshotRows`; also rows whose tails lack tokens since the anchor."""
        layout, places = self.layout, self.layout.anchored
        wrong = wrong_tags(store, row_id, places.anchor_length, self.read_slot) | wrong_tails(store, layout)
        return wrong | shared_writes(store, layout.read_slot, places.due_slot, jnp.arange(row_id.shape[0]))

    def hidden_before(self, store: Store, *, all_rows: bool) -> Float[Array, "rows hidden"]:
        """As of `SnapshotRows`; from the tail where the row has absorbed tokens since its anchor."""
        anchored = super().hidden_before(store, all_rows=all_rows)
        if not all_rows:
            return anchored
        assert store.tails is not None
        last = read_ring(store.tails.hidden, self.layout.anchored.tail_id, self.length[:, None] - 1)[:, 0]
        return jnp.where((self.length > self.layout.anchored.anchor_length)[:, None], last, anchored)

    def write(self, store: Store, hidden: Hidden, wrong: Bool[Array, " rows"], *, for_drafts: bool) -> Store:
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


def running_rows(
    store: Store,
    rows: Rows,
    batch: DecodeBatch,
    *,
    length: Int[Array, " rows"],
    num_tokens: Int[Array, " rows"],
    page_table: Int[Array, "rows pages"],
) -> SnapshotRows | ReplayRows:
    """Returns the batch's rows, in the form of the store. Rows that continue read the slots of their seats."""
    read_slot = jnp.where(batch.continues, rows.slot[batch.row_id], batch.read_slot)
    places = {
        "length": length,
        "num_tokens": num_tokens,
        "read_slot": read_slot,
        "write_slot": batch.write_slot,
        "page_table": page_table,
    }
    if store.tails is None:
        return SnapshotRows(length, num_tokens, read_slot, DecodeLayout.of(**places))
    assert rows.anchor is not None
    assert batch.anchor is not None
    layout = ReplayLayout.from_anchor(
        **places, anchor=jnp.where(batch.continues, rows.anchor[batch.row_id], batch.anchor), tail_id=batch.row_id,
        steps=batch.tokens.shape[1], interval=store.tails.interval,
    )  # fmt: skip
    return ReplayRows(length, num_tokens, read_slot, layout)
