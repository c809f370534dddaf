"""What completes a slot after the sublayers have written their states: hidden state, debugging tag, rounding. And what
decode rows and prefill rows hand on.

With `debug_state`, also the checks that a step reads the state that it expects, and that no other row writes it.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.slots import read_slots, write_slots
from mamba_jax.layout.decode import ReplayLayout
from mamba_jax.rounding import RoundedRows
from mamba_jax.store import SlotArrays, Store, load, put

Resumption = tuple[Int[Array, " rows"], Int[Array, " rows"] | None]
"""The slot that each row reads next and, under replay, how many tokens the state in it has absorbed."""


@dataclass(frozen=True)
class StepHidden:
    """The result of a part of a step after its slots are complete."""

    hidden: Float[Array, "T hidden"]
    """After the final norm; for rows without tokens, the hidden state in their slot."""
    before: Float[Array, "rows hidden"]
    """The hidden state before each row's first token; zeros without one."""
    wrong: Bool[Array, " rows"]
    """With `debug_state`: rows that read another state than their own."""


@dataclass(frozen=True)
class SampledRows:
    """The sampling inputs of the rows of one batch."""

    row_id: Int[Array, " rows"]
    sample: Bool[Array, " rows"]
    """Whether the row emits tokens."""
    drafts: Int[Array, "rows H-1"]
    num_drafts: Int[Array, " rows"]
    length: Int[Array, " rows"]
    """Tokens before the first that is emitted."""


def write_hidden(
    store: Store, hidden: Float[Array, "n hidden"], write_slot: Int[Array, " n"], length: Int[Array, " n"]
) -> Store:
    """Writes final hidden states, and debugging tags, into the slots that have absorbed `length` tokens.

    This completes the slots. Where running rows are rounded, it also rounds the states that are due.
    """
    tags = store.tags
    if tags is not None:
        times = read_slots(tags, write_slot)[:, 0] + 1
        tags = write_slots(tags, jnp.stack([times, length], axis=1), write_slot)
    store = dataclasses.replace(store, hidden=write_slots(store.hidden, hidden, write_slot), tags=tags)
    return store if store.rounded is None else _round(store, store.rounded, write_slot, length)


def _round(store: Store, rounded: RoundedRows, write_slot: Int[Array, " n"], length: Int[Array, " n"]) -> Store:
    """Rounds in place the states, of these slots, that have absorbed a multiple of `rounded.every` tokens."""
    is_due = (length > 0) & (length % rounded.every == 0)
    due = jnp.where(is_due, write_slot, 0)
    slots_due = due[jnp.nonzero(due, size=len(due), fill_value=0)[0]]

    def one(i: Int[Array, ""], slots: tuple[SlotArrays, ...]) -> tuple[SlotArrays, ...]:
        def changed(name: str, array: Array) -> Array:
            if name not in rounded.names:
                return array
            return put(array, rounded.narrow.rounded(load(array, slots_due[i])), slots_due[i])

        return tuple({name: changed(name, array) for name, array in arrays.items()} for arrays in slots)

    return dataclasses.replace(store, slots=jax.lax.fori_loop(0, (due > 0).sum(), one, store.slots))


def wrong_tails(store: Store, layout: ReplayLayout) -> Bool[Array, " rows"]:
    """With `debug_state`: rows whose tail does not match the tokens since their anchor, or that have no state to
    continue from."""
    if store.tails is None or store.tails.tags is None:
        return jnp.zeros(layout.read_slot.shape, bool)
    places = layout.anchored
    lost = (places.boundary <= places.length + places.num_tokens) & (places.write_slot == 0)
    return (places.tail_id > 0) & (places.num_tokens > 0) & (lost | ~layout.is_tail_right(store.tails.tags))


def wrong_tags(
    store: Store, row_id: Int[Array, " rows"], length: Int[Array, " rows"], read_slot: Int[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Rows about to read a slot that does not hold exactly `length` tokens (the null slot holds none). What they write
    is tagged as wrong too."""
    if store.tags is None:
        return jnp.zeros(row_id.shape, bool)
    held = read_slots(store.tags, read_slot)[:, 1]
    return (row_id > 0) & (held != length)


def shared_writes(
    store: Store, read_slot: Int[Array, " rows"], write_slot: Int[Array, " writes"], writer: Int[Array, " writes"]
) -> Bool[Array, " rows"]:
    """With `debug_state`: rows that read a slot that another row writes, or write a slot that is written twice.

    Rows run in any order, so neither is allowed (`kernels_pallas.slots`).
    """
    if store.tags is None:
        return jnp.zeros(read_slot.shape, bool)
    rows, writes = jnp.arange(read_slot.shape[0]), jnp.arange(write_slot.shape[0])
    real = write_slot > 0
    by_another = real & (writer != rows[:, None]) & (write_slot == read_slot[:, None])
    twice = real & (writes != writes[:, None]) & (write_slot == write_slot[:, None])
    return by_another.any(axis=1) | jnp.zeros(read_slot.shape, bool).at[writer].max(twice.any(axis=0))
