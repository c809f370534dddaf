"""Planted faults of rows that are held by an anchor and the inputs since. See `faults`."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import api as convolution
from kernels_pallas.gated_recurrence import xla as between
from kernels_pallas.places import Anchored
from mamba_jax.batch import DecodeBatch
from mamba_jax.layout.decode import ReplayLayout
from mamba_jax.store import Replay
from tests.serving.differential.faults import REPLAY, Patch, after_filling, filling, patch_step, replacing
from tests.serving.differential.faults import fault as _fault

fault = partial(_fault, table=REPLAY)


def _commit(patch: Patch, change) -> None:
    """`change(rows, row_id, length, slot, anchor)` gives slot and anchor as they are noted."""

    def changed(sound):
        def commit(rows, row_id, length, slot, emission, anchor):
            slot, anchor = change(rows, row_id, length, slot, anchor)
            return sound(rows, row_id, length, slot, emission, anchor)

        return commit

    patch_step(patch, "commit", changed)


def _replayed(patch: Patch, change) -> None:
    """`change(places)` gives fields of the places that the operation is told."""
    sound = between.recurrence_replay

    def replay(entry, store, tail, places, **how):
        return sound(entry, store, tail, dataclasses.replace(places, **change(places)), **how)

    patch.setattr(between, "recurrence_replay", replay)


def _laid_out(patch: Patch, change) -> None:
    """`change(rows)` gives what a layout is made of."""
    sound = ReplayLayout.from_anchor
    patch.setattr(ReplayLayout, "from_anchor", lambda **rows: sound(**(rows | change(rows))))


# -- anchors --


@fault(34, "decode")
def position_stays(patch: Patch) -> None:
    _commit(patch, lambda rows, row_id, length, slot, anchor: (slot, rows.anchor[row_id]))


@fault(35, "decode")
def slot_stays(patch: Patch) -> None:
    _commit(patch, lambda rows, row_id, length, slot, anchor: (rows.slot[row_id], anchor))


@fault(36, "decode")
def anchored_in_rejected_drafts(patch: Patch) -> None:
    def changed(sound):
        return lambda *args: anchored(*sound(*args), *args[2:4])

    def anchored(store, after, output, rows, batch):
        if not isinstance(batch, DecodeBatch):
            return store, after, output
        length = jnp.where(batch.continues, rows.length[batch.row_id], batch.length)
        interval = store.tails.interval
        multiple = (length // interval + 1) * interval
        reached = multiple <= length + batch.num_tokens - batch.num_drafts + output.num_drafts
        seats = jnp.where(reached & (batch.row_id > 0), batch.row_id, rows.length.shape[0])
        slot = after.slot.at[seats].set(batch.write_slot[:, 0], mode="drop")
        anchor = after.anchor.at[seats].set(multiple, mode="drop")
        return store, dataclasses.replace(after, slot=slot, anchor=anchor), output

    patch_step(patch, "step", changed)


@fault(37, "prefill")
def anchor_of_the_last_tenant(patch: Patch) -> None:
    _commit(patch, lambda rows, row_id, length, slot, anchor: (slot, jnp.minimum(rows.anchor[row_id], length)))


@fault(38, "decode")
def multiple_at_the_row_itself(patch: Patch) -> None:
    rounded = property(lambda self: -(-self.length // self.interval) * self.interval)
    patch.setattr(Anchored, "boundary", rounded)


@fault(39, "decode")
def multiples_of_drafts_are_missed(patch: Patch) -> None:
    reached = property(lambda self: jnp.where(self.boundary <= self.length + 1, self.write_slot, 0))
    patch.setattr(Anchored, "due_slot", reached)


# -- tails --


@fault(40, "decode")
def one_entry_too_many(patch: Patch) -> None:
    _replayed(patch, lambda places: {"anchor_length": jnp.maximum(places.anchor_length - 1, 0)})


@fault(41, "decode")
def one_entry_too_few(patch: Patch) -> None:
    def change(places):
        return {"anchor_length": jnp.minimum(places.anchor_length + 1, places.length)}

    _replayed(patch, change)


@fault(42, "decode")
@replacing(Replay, "entries")
def rings_too_short(sound, self: Any, array: Any):
    return sound(self, array) if array.last is None else 1 << (array.last - 1).bit_length()


@fault(43, "decode")
@replacing(convolution, "write_ring")
def appended_too_far(sound, ring, values, tail_id, position, valid):
    return sound(ring, values, tail_id, position + 1, valid)


@fault(44, "decode")
def one_tail_for_all(patch: Patch) -> None:
    _laid_out(patch, lambda rows: {"tail_id": jnp.minimum(rows["tail_id"], 1)})


@fault(45, "decode")
def tails_by_place(patch: Patch) -> None:
    _laid_out(patch, lambda rows: {"tail_id": 1 + jnp.arange(len(rows["tail_id"]))})


@fault(46, "decode")
@replacing(convolution, "write_ring")
def drafts_are_not_appended(sound, ring, values, tail_id, position, valid):
    return sound(ring, values, tail_id, position, valid & (jnp.arange(valid.shape[1]) == 0))


# -- windows --


@fault(47, "decode")
def window_across_the_anchor(patch: Patch) -> None:
    def before(store, ring, places):
        position = places.length[:, None] - store.shape[1] + jnp.arange(store.shape[1])
        return convolution.read_ring(ring, places.tail_id, position)

    patch.setattr(convolution, "inputs_before", before)


@fault(48, "decode")
def window_of_the_anchor(patch: Patch) -> None:
    def before(store, ring, places):
        return convolution.read_windows(store, places.anchor_slot)

    patch.setattr(convolution, "inputs_before", before)


@fault(49, "decode")
def window_is_not_written(patch: Patch) -> None:
    patch.setattr(convolution, "write_windows", lambda store, values, index, share: store)


# -- what the host fills in --


@fault(50)
@filling("decode")
def spares_swapped(builder, batch, rows):
    batch.write_slot[: len(rows)] = batch.write_slot[: len(rows)][::-1].copy()


@fault(51)
def spare_named_late(patch: Patch) -> None:
    last: dict[int, int] = {}

    def hold_back(builder, batch, rows) -> None:
        for i, row in enumerate(rows):
            now = int(batch.write_slot[i, 0])
            batch.write_slot[i, 0] = now if last.get(row.row_id) == now else 0
            last[row.row_id] = now

    after_filling(patch, "decode", hold_back)


# -- the draft layer --


@fault(52, "decode")
def hidden_of_the_anchor(patch: Patch) -> None:
    def read(ring, tail_id, position):
        return jnp.zeros((*position.shape, *ring.shape[2:]), ring.dtype)

    patch_step(patch, "read_ring", lambda sound: read)
