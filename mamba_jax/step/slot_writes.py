"""What completes a slot after the sublayers have written their states: hidden state, debugging tag, rounding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.slots import read_slots, write_slots
from mamba_jax.rounding import RoundedRows
from mamba_jax.store import SlotArrays, Store, load, put


def write_hidden(
    store: Store,
    hidden: Float[Array, "n hidden"],
    write_slot: Int[Array, " n"],
    length: Int[Array, " n"],
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
