"""Tails: rings of a row's inputs since its anchor, which is a stored state. Tail 0 is null. Shared by all replays.

Token n is stored at entry n % entries. Only entries of tokens from the anchor on are used; all others, which may hold
NaN, are masked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.places import Anchored
from kernels_pallas.row_loop import head_axes
from kernels_pallas.shape_check import check_shapes
from kernels_pallas.slots import read_slots, take, write_slots

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Order:
    """The tokens since the anchor in order; entry i of a tail has those at positions i modulo the number of entries."""

    position: Int[Array, "rows entries"]
    """The position of each token: the anchor's length, the anchor's length + 1, ..."""
    valid: Bool[Array, "rows entries"]
    """Whether a token (old or new) has that position."""
    new_position: Int[Array, "rows steps"]
    is_old: Bool[Array, "rows entries"]
    """Whether it is not new."""
    is_new: Bool[Array, "rows steps"]
    """Whether a new token is no padding."""
    index_of_new: Int[Array, "rows steps"]
    """Indices of new tokens in the order."""

    @classmethod
    def of(cls, places: Anchored, *, entries: int, steps: int) -> Order:
        anchor_length, length, num_tokens = (
            v[:, None] for v in (places.anchor_length, places.length, places.num_tokens)
        )
        step = jnp.arange(steps)
        position, new_position = anchor_length + jnp.arange(entries), length + step
        valid = (position < length + num_tokens) & (num_tokens > 0)
        is_old, is_new, index_of_new = position < length, step < num_tokens, new_position - anchor_length
        return cls(position, valid, new_position, is_old, is_new, index_of_new)


def row_numbers(places: Anchored) -> tuple[Int[Array, " rows"], ...]:
    """The places as kernels take them: slots are 0 where they are not accessed; the boundary replaces the interval."""
    found = (
        places.live_anchor, places.tail_id, places.anchor_length, places.length, places.num_tokens, places.due_slot,
        places.boundary,
    )  # fmt: skip
    return tuple(one.astype(jnp.int32) for one in found)


def append(tail, new, order, tail_id):
    """Returns the tail's arrays [tails, entries, ...] with the entries of the new tokens [rows, steps, ...]."""
    place = tail_id, order.new_position, order.is_new
    return [write_ring(old, values, *place) for old, values in zip(tail, new, strict=True)]


def in_order(
    kept: Shaped[Array, "tails entries channels"], order: Order, tail_id: Int[Array, " rows"], *shape: int
) -> Float[Array, "rows entries *shape"]:
    """Returns a tail's entries from the anchor on, float32; zeros where there is no token."""
    entries = kept.shape[1]
    found = take(kept.reshape(-1, kept.shape[2]), tail_id[:, None] * entries + order.position % entries)
    return jnp.where(order.valid[..., None], found, 0).astype(F32).reshape(*found.shape[:2], *shape)


def read_ring(
    ring: Shaped[Array, "tails entries *shape"], tail_id: Int[Array, " rows"], position: Int[Array, "rows n"]
) -> Shaped[Array, "rows n *shape"]:
    """Returns the entries of the tokens at these positions. The caller must know whether they are filled."""
    entries = ring.shape[1]
    places = tail_id[:, None] * entries + position % entries
    found = read_slots(ring.reshape(-1, *ring.shape[2:]), places.reshape(-1))
    return found.reshape(*position.shape, *ring.shape[2:])


def write_ring(
    ring: Shaped[Array, "tails entries *shape"],
    values: Shaped[Array, "rows n ..."],
    tail_id: Int[Array, " rows"],
    position: Int[Array, "rows n"],
    valid: Bool[Array, "rows n"],
) -> Shaped[Array, "tails entries *shape"]:
    """Returns the ring with values at these positions; those that are not valid, and those of tail 0, go nowhere."""
    entries = ring.shape[1]
    there = valid & (tail_id > 0)[:, None]
    places = jnp.where(there, tail_id[:, None] * entries + position % entries, 0)
    return write_slots(ring, values.reshape(-1, *ring.shape[2:]), places.reshape(-1))


def at(values: Float[Array, "rows entries heads"], index: Int[Array, "rows n"]) -> Float[Array, "rows n heads"]:
    """values[row, index]; any value where the index is out of bounds."""
    return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1)[..., None], axis=1)


def state_after(anchor, decay, fed, keys):
    """One row's state [heads, head_dim, state]: the anchor's part, times its decay [heads] or [heads, state], and what
    each token's input (decayed, [entries, heads, head_dim]) adds by its key [entries, groups, state]. Without `dot`.
    """
    split, shared = head_axes(anchor.shape[0], keys.shape[1])
    state = (anchor * decay.reshape(len(decay), 1, -1)).reshape(*split, *anchor.shape[1:])

    def add(n, state):
        return state + fed[n].reshape(*split, -1, 1) * keys[n].reshape(*shared, 1, -1)

    return lax.fori_loop(0, len(fed), add, state).reshape(anchor.shape)


def check_tail(
    operation: str, tail: Mapping[str, Any], channels: Mapping[str, int], *, interval: int, steps: int
) -> None:
    """Raises ValueError unless the arrays of a tail have these channels, and it has room for an interval and a step."""
    described = {name: (array, f"tails entries n_{name}") for name, array in tail.items() if array is not None}
    sizes = check_shapes(f"{operation}: tail", **described)
    for name, expected in channels.items():
        if sizes[f"n_{name}"] != expected:
            shape = tuple(tail[name].shape)
            raise ValueError(f"{operation}: tail.{name} has shape {shape}, expected {expected} channels")
    if interval < 1:
        raise ValueError(f"{operation}: the interval is {interval}, expected at least 1")
    entries, least = sizes["entries"], interval + steps - 1
    if entries & (entries - 1) or entries < least:
        wanted = f"a power of two of at least {least} (interval + steps - 1)"
        raise ValueError(f"{operation}: tails have {entries} entries, expected {wanted}")
