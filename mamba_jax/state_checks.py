"""Checks of `debug_state`: a step reads the state that it expects, and no other row writes it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels_pallas.slots import read_slots
from mamba_jax.layout.replay import ReplayLayout
from mamba_jax.store import Store


def wrong_tails(store: Store, layout: ReplayLayout) -> Bool[Array, " rows"]:
    """With `debug_state`: rows whose tail does not match the tokens since their anchor, or that have no state to
    continue from."""
    if store.tails is None or store.tails.tags is None:
        return jnp.zeros(layout.length.shape, bool)
    lost = (layout.next_multiple <= layout.length + layout.num_tokens) & (layout.write_slot[:, 0] == 0)
    return (layout.tail_id > 0) & (layout.num_tokens > 0) & (lost | ~layout.is_tail_right(store.tails.tags))


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
