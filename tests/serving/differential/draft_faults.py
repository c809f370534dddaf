"""Planted faults of steps with drafts, and of rows that are held by an anchor and the inputs since. See `faults`."""

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas.causal_conv1d import api as convolution
from kernels_pallas.gated_recurrence import xla as between
from kernels_pallas.places import Anchored
from mamba_jax.batch import DecodeBatch
from mamba_jax.drafts import mtp
from mamba_jax.layout.decode import ReplayLayout
from mamba_jax.sampling import draw_tokens, logits
from mamba_jax.store import Replay
from serving.engine.steps import results
from serving.engine.steps.batching import BatchBuilder
from tests.serving.core.mutations.registry import replacing
from tests.serving.differential.faults import CONVOLUTION, DRAFTS, REPLAY, Patch, filling, in_step
from tests.serving.differential.faults import fault as _fault

choosing = importlib.import_module("mamba_jax.sampling.choose")  # the package's `choose` is the function in it
fault = partial(_fault, table=DRAFTS)
replay_fault = partial(_fault, table=REPLAY)


# -- rolling back --


def after_decode(change: Callable) -> Callable[[Patch], None]:
    """`change(before, rows, batch, output)` gives what a decode step says to leave in the seats."""

    @replacing(*in_step("step"))
    @wraps(change)
    def step(sound, model, store, rows, batch, *rest):
        store, after, output = sound(model, store, rows, batch, *rest)
        drafted = isinstance(batch, DecodeBatch) and output.num_drafts is not None
        return store, change(rows, after, batch, output) if drafted else after, output

    return step


def _last_fed(batch, output):
    return batch.num_tokens - batch.num_drafts + output.num_drafts - 1


def _landed(rows, batch, at):
    """The seats, reading next what lies in place `at` of the slots that were written."""
    slot = jnp.take_along_axis(jnp.asarray(batch.write_slot), jnp.maximum(at, 0)[:, None], axis=1)[:, 0]
    seats = jnp.where((jnp.asarray(batch.num_tokens) > 0) & (slot > 0), batch.row_id, rows.slot.shape[0])
    return dataclasses.replace(rows, slot=rows.slot.at[seats].set(slot, mode="drop"))


@fault(17, compiles="decode")
@after_decode
def no_rollback(before, rows, batch, output):
    return _landed(rows, batch, _last_fed(batch, output))


@fault(18, compiles="decode")
@after_decode
def accepted_drafts_are_forgotten(before, rows, batch, output):
    return _landed(rows, batch, jnp.asarray(batch.num_tokens) - batch.num_drafts - 1)


@fault(19, *CONVOLUTION, compiles="decode")
def window_not_rolled_back(sound, x, weight, bias, store, rows, **how):
    (y, store), write_slot = sound(x, weight, bias, store, rows, **how), rows.write_slot
    places = jnp.arange(write_slot.shape[1])
    last = jnp.max(jnp.where(write_slot > 0, places, 0), axis=1)[:, None]
    window = store[jnp.take_along_axis(write_slot, last, axis=1)]
    everywhere = jnp.where(write_slot > 0, write_slot, store.shape[0])
    return y, store.at[everywhere].set(jnp.broadcast_to(window, (*write_slot.shape, *store.shape[1:])), mode="drop")


@fault(20, compiles="decode")
@after_decode
def length_counts_rejected_drafts(before, rows, batch, output):
    length = jnp.where(batch.continues, before.length[batch.row_id], batch.length)
    seats = jnp.where(jnp.asarray(batch.row_id) > 0, batch.row_id, rows.length.shape[0])
    length = length + jnp.where(jnp.asarray(batch.num_tokens) > 0, _last_fed(batch, output) + 1, 0)
    return dataclasses.replace(rows, length=rows.length.at[seats].set(length, mode="drop"))


# -- verifying --


@fault(21, compiles="decode")
def accepted_behind_a_wrong_one(patch: Patch) -> None:
    changed = {"cumprod": lambda right, axis, dtype: right.astype(dtype)}
    patch.setattr(choosing, "jnp", SimpleNamespace(**vars(jnp) | changed))


@fault(22, compiles="decode")
def missing_drafts_are_accepted(patch: Patch) -> None:
    missing = 1 << 20

    def step(sound, model, store, rows, batch, *rest):
        if isinstance(batch, DecodeBatch):
            rows = dataclasses.replace(rows, drafts=jnp.where(rows.drafts < 0, missing, rows.drafts))
        return sound(model, store, rows, batch, *rest)

    def choose(sound, logits, asked, **rest):
        said, drafts = sound(logits, asked, **rest), asked.drafts
        if not drafts.shape[1]:
            return said
        next_draft = jnp.take_along_axis(drafts, jnp.minimum(said.accepted, drafts.shape[1] - 1)[:, None], axis=1)[:, 0]
        wrong = (said.count > 0) & (next_draft == missing)
        at = jnp.arange(logits.shape[1]) == said.count[:, None]
        tokens = jnp.where(wrong[:, None] & at, 0, said.tokens)
        return dataclasses.replace(said, tokens=tokens, count=said.count + wrong, accepted=said.accepted + wrong)

    replacing(*in_step("step"))(step)(patch)
    replacing(*in_step("choose"))(choose)(patch)


@fault(23, draw_tokens, "_of_heads", compiles="decode")
def one_draw_for_a_step(sound, asked):
    seat, index = sound(asked)
    return seat, jnp.repeat(index.reshape(asked.index.shape)[:, 0], asked.index.shape[1])


# Penalties overlook drafts.
fault(24, logits, "penalize", compiles="decode")(lambda sound, *args: sound(*args[:-1], args[-1] * 0 - 1))


@fault(25, compiles="decode")
@after_decode
def penalties_count_rejected_drafts(before, rows, batch, output):
    drafts = before.drafts[batch.row_id]
    fed = jnp.arange(drafts.shape[1]) < output.num_drafts[:, None]
    rejected = fed & (jnp.arange(drafts.shape[1]) >= output.num_emitted[:, None] - 1)
    seats = jnp.where(rejected, jnp.asarray(batch.row_id)[:, None], rows.length.shape[0])
    return dataclasses.replace(rows, output_counts=rows.output_counts.at[seats, drafts].add(1, mode="drop"))


# -- the draft layer --


@fault(26, mtp, "_after_decode", compiles="decode")
def layer_reads_the_newest_only(sound, model, store, facts):
    rows = facts.row_id.shape[0]
    by_row = facts.hidden.reshape(rows, -1, facts.hidden.shape[-1])
    last = jnp.take_along_axis(by_row, jnp.maximum(facts.kept - 1, 0)[:, None, None], axis=1)[:, 0]
    return model.draft(facts.newest, last, mtp._single(facts, facts.length + facts.kept), store)


@fault(27, mtp, "_after_prefill", compiles="prefill")
def no_hidden_before_a_chunk(sound, model, store, facts):
    return sound(model, store, dataclasses.replace(facts, before=facts.before * 0))


@fault(28, mtp, "_after_prefill", compiles="prefill")
def last_pair_of_a_chunk_is_lost(sound, model, store, facts):
    """Each hidden state with the token after it in the chunk, its last one with the newest, as if that were all."""
    layout = facts.layout
    first = jnp.arange(facts.tokens.shape[0]) == layout.packed.row_start[layout.packed.token_row]
    keep = dataclasses.replace(layout, positions=jnp.where(first, -1, layout.positions))
    _, store = model.draft(facts.tokens, jnp.roll(facts.hidden, 1, axis=0), keep, store)
    last = facts.hidden[jnp.maximum(layout.packed.row_start + facts.kept - 1, 0)]
    return model.draft(facts.newest, last, mtp._single(facts, facts.length + facts.kept), store)


@fault(29, *in_step("copy_shared_pages"), compiles="decode")
def draft_layer_is_not_copied(sound, store, *copies):
    copied = sound(store, *copies)
    return dataclasses.replace(copied, kv=(*copied.kv[:-1], store.kv[-1]))


# -- what the host fills in --


@fault(30)
@filling("decode")
def tails_are_padded(self, batch, rows):
    for i, row in enumerate(rows):
        if row.is_prefill and row.num_tokens:
            width = batch.tokens.shape[1]
            batch.tokens[i, row.num_tokens :] = 0
            batch.write_slot[i, width - 1] = batch.write_slot[i, row.num_tokens - 1]
            batch.write_slot[i, row.num_tokens - 1 : width - 1] = 0
            batch.num_tokens[i] = width


# Penalty counts are lost.
fault(32, BatchBuilder, "seat")(lambda sound, self, *row, output, **rest: sound(self, *row, output=(), **rest))


@fault(33, results, "read_results")
def alternatives_of_the_first_head(sound, output, rows, **rest):
    lines = sound(output, rows, **rest)
    if lines.top_ids is not None:
        lines.top_ids = np.broadcast_to(lines.top_ids[:, :1], lines.top_ids.shape)
        lines.top_logprobs = np.broadcast_to(lines.top_logprobs[:, :1], lines.top_logprobs.shape)
    return lines


@fault(31)
@filling("decode")
def planned_slot(self, batch, rows):
    for i, row in enumerate(rows):
        if not row.is_prefill and not row.num_drafts:
            batch.continues[i] = False
            batch.tokens[i, 0] = row.request.tokens[-1]
            batch.read_slot[i] = row.access.writes[0]
            batch.length[i] = len(row.request.tokens) - 1


# -- anchors --


@replay_fault(34, *in_step("commit"), compiles="decode")
def position_stays(sound, rows, row_id, length, slot, emission, anchor):
    return sound(rows, row_id, length, slot, emission, anchor if anchor is None else rows.anchor[row_id])


@replay_fault(35, *in_step("commit"), compiles="decode")
def slot_stays(sound, rows, row_id, length, slot, emission, anchor):
    return sound(rows, row_id, length, slot if anchor is None else rows.slot[row_id], emission, anchor)


@replay_fault(36, *in_step("step"), compiles="decode")
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


@replay_fault(37, *in_step("commit"), compiles="prefill")
def anchor_of_the_last_tenant(sound, rows, row_id, length, slot, emission, anchor):
    last = anchor if anchor is None else jnp.minimum(rows.anchor[row_id], length)
    return sound(rows, row_id, length, slot, emission, last)


@replay_fault(38, compiles="decode")
def multiple_at_the_row_itself(patch: Patch) -> None:
    rounded = property(lambda self: -(-self.length // self.interval) * self.interval)
    patch.setattr(Anchored, "boundary", rounded)


@replay_fault(39, compiles="decode")
def multiples_of_drafts_are_missed(patch: Patch) -> None:
    reached = property(lambda self: jnp.where(self.boundary <= self.length + 1, self.write_slot, 0))
    patch.setattr(Anchored, "due_slot", reached)


# -- tails --


@replay_fault(40, between, "recurrence_replay", compiles="decode")
def one_entry_too_many(sound, entry, store, tail, places, **how):
    moved = dataclasses.replace(places, anchor_length=jnp.maximum(places.anchor_length - 1, 0))
    return sound(entry, store, tail, moved, **how)


@replay_fault(41, between, "recurrence_replay", compiles="decode")
def one_entry_too_few(sound, entry, store, tail, places, **how):
    moved = dataclasses.replace(places, anchor_length=jnp.minimum(places.anchor_length + 1, places.length))
    return sound(entry, store, tail, moved, **how)


@replay_fault(42, Replay, "entries", compiles="decode")
def rings_too_short(sound, self: Any, array: Any):
    return sound(self, array) if array.last is None else 1 << (array.last - 1).bit_length()


@replay_fault(43, convolution, "append", compiles="decode")
def appended_too_far(sound, rings, new, places):
    return sound(rings, new, dataclasses.replace(places, length=places.length + 1))


@replay_fault(44, ReplayLayout, "from_anchor", compiles="decode")
def one_tail_for_all(sound, *, tail_id, **rows):
    return sound(tail_id=jnp.minimum(tail_id, 1), **rows)


@replay_fault(45, ReplayLayout, "from_anchor", compiles="decode")
def tails_by_place(sound, *, tail_id, **rows):
    return sound(tail_id=1 + jnp.arange(len(tail_id)), **rows)


@replay_fault(46, convolution, "append", compiles="decode")
def drafts_are_not_appended(sound, rings, new, places):
    return sound(rings, new, dataclasses.replace(places, num_tokens=jnp.minimum(places.num_tokens, 1)))


# -- windows --


@replay_fault(47, convolution, "inputs_before", compiles="decode")
def window_across_the_anchor(sound, store, ring, places):
    position = places.length[:, None] - store.shape[1] + jnp.arange(store.shape[1])
    return convolution.read_ring(ring, places.tail_id, position)


@replay_fault(48, convolution, "inputs_before", compiles="decode")
def window_of_the_anchor(sound, store, ring, places):
    return convolution.read_windows(store, places.anchor_slot)


# Windows are not written.
replay_fault(49, convolution, "write_windows", compiles="decode")(lambda sound, store, values, index, share: store)


# -- what the host fills in --


@replay_fault(50)
@filling("decode")
def spares_swapped(builder, batch, rows):
    batch.write_slot[: len(rows)] = batch.write_slot[: len(rows)][::-1].copy()


@replay_fault(51)
def spare_named_late(patch: Patch) -> None:
    last: dict[int, int] = {}

    @filling("decode")
    def hold_back(builder, batch, rows) -> None:
        for i, row in enumerate(rows):
            now = int(batch.write_slot[i, 0])
            batch.write_slot[i, 0] = now if last.get(row.row_id) == now else 0
            last[row.row_id] = now

    hold_back(patch)


# -- the draft layer --


@replay_fault(52, *in_step("read_ring"), compiles="decode")
def hidden_of_the_anchor(sound, ring, tail_id, position):
    return jnp.zeros((*position.shape, *ring.shape[2:]), ring.dtype)
