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
from tests.serving.differential.faults import REPLAY, Patch, after_filling, filling, in_step
from tests.serving.differential.faults import fault as _fault

fault = partial(_fault, table=REPLAY)


# -- anchors --


@fault(34, *in_step("commit"), compiles="decode")
def position_stays(sound, rows, row_id, length, slot, emission, anchor):
    return sound(rows, row_id, length, slot, emission, anchor if anchor is None else rows.anchor[row_id])


@fault(35, *in_step("commit"), compiles="decode")
def slot_stays(sound, rows, row_id, length, slot, emission, anchor):
    return sound(rows, row_id, length, slot if anchor is None else rows.slot[row_id], emission, anchor)


@fault(36, *in_step("step"), compiles="decode")
def anchored_in_rejected_drafts(sound, model, store, rows, batch, *rest):
    store, after, output = sound(model, store, rows, batch, *rest)
    if not isinstance(batch, DecodeBatch) or rows.anchor is None or output.num_drafts is None:
        return store, after, output
    length = jnp.where(batch.continues, rows.length[batch.row_id], batch.length)
    interval = store.tails.interval
    multiple = (length // interval + 1) * interval
    reached = multiple <= length + batch.num_tokens - batch.num_drafts + output.num_drafts
    seats = jnp.where(reached & (batch.row_id > 0), batch.row_id, rows.length.shape[0])
    slot = after.slot.at[seats].set(batch.write_slot[:, 0], mode="drop")
    anchor = after.anchor.at[seats].set(multiple, mode="drop")
    return store, dataclasses.replace(after, slot=slot, anchor=anchor), output


@fault(37, *in_step("commit"), compiles="prefill")
def anchor_of_the_last_tenant(sound, rows, row_id, length, slot, emission, anchor):
    last = anchor if anchor is None else jnp.minimum(rows.anchor[row_id], length)
    return sound(rows, row_id, length, slot, emission, last)


@fault(38, compiles="decode")
def multiple_at_the_row_itself(patch: Patch) -> None:
    rounded = property(lambda self: -(-self.length // self.interval) * self.interval)
    patch.setattr(Anchored, "boundary", rounded)


@fault(39, compiles="decode")
def multiples_of_drafts_are_missed(patch: Patch) -> None:
    reached = property(lambda self: jnp.where(self.boundary <= self.length + 1, self.write_slot, 0))
    patch.setattr(Anchored, "due_slot", reached)


# -- tails --


@fault(40, between, "recurrence_replay", compiles="decode")
def one_entry_too_many(sound, entry, store, tail, places, **how):
    moved = dataclasses.replace(places, anchor_length=jnp.maximum(places.anchor_length - 1, 0))
    return sound(entry, store, tail, moved, **how)


@fault(41, between, "recurrence_replay", compiles="decode")
def one_entry_too_few(sound, entry, store, tail, places, **how):
    moved = dataclasses.replace(places, anchor_length=jnp.minimum(places.anchor_length + 1, places.length))
    return sound(entry, store, tail, moved, **how)


@fault(42, Replay, "entries", compiles="decode")
def rings_too_short(sound, self: Any, array: Any):
    return sound(self, array) if array.last is None else 1 << (array.last - 1).bit_length()


@fault(43, convolution, "write_ring", compiles="decode")
def appended_too_far(sound, ring, values, tail_id, position, valid):
    return sound(ring, values, tail_id, position + 1, valid)


@fault(44, ReplayLayout, "from_anchor", compiles="decode")
def one_tail_for_all(sound, *, tail_id, **rows):
    return sound(tail_id=jnp.minimum(tail_id, 1), **rows)


@fault(45, ReplayLayout, "from_anchor", compiles="decode")
def tails_by_place(sound, *, tail_id, **rows):
    return sound(tail_id=1 + jnp.arange(len(tail_id)), **rows)


@fault(46, convolution, "write_ring", compiles="decode")
def drafts_are_not_appended(sound, ring, values, tail_id, position, valid):
    return sound(ring, values, tail_id, position, valid & (jnp.arange(valid.shape[1]) == 0))


# -- windows --


@fault(47, convolution, "inputs_before", compiles="decode")
def window_across_the_anchor(sound, store, ring, places):
    position = places.length[:, None] - store.shape[1] + jnp.arange(store.shape[1])
    return convolution.read_ring(ring, places.tail_id, position)


@fault(48, convolution, "inputs_before", compiles="decode")
def window_of_the_anchor(sound, store, ring, places):
    return convolution.read_windows(store, places.anchor_slot)


@fault(49, convolution, "write_windows", compiles="decode")
def window_is_not_written(sound, store, values, index, share):
    return store


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


@fault(52, *in_step("read_ring"), compiles="decode")
def hidden_of_the_anchor(sound, ring, tail_id, position):
    return jnp.zeros((*position.shape, *ring.shape[2:]), ring.dtype)
