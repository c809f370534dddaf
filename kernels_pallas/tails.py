"""Tails: rings of a row's inputs since its anchor, which is a stored state. Tail 0 is null. Shared by all replays.

Token n is stored at entry n % entries. Only entries of tokens from the anchor on are used; all others, which may hold
NaN, are masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.places import Anchored
from kernels_pallas.shape_check import check_shapes
from kernels_pallas.slots import read_slots, write_slots


def row_numbers(places: Anchored) -> tuple[Int[Array, " rows"], ...]:
    """The places as kernels take them: slots are 0 where they are not accessed; the boundary replaces the interval."""
    found = (
        places.live_anchor, places.tail_id, places.anchor_length, places.length, places.num_tokens, places.due_slot,
        places.boundary,
    )  # fmt: skip
    return tuple(one.astype(jnp.int32) for one in found)


def append(rings, new, places: Anchored):
    """Returns a tail's arrays [tails, entries, ...] with the entries of the new tokens [rows, steps, ...]."""
    step = jnp.arange(new[0].shape[1])
    place = places.tail_id, places.length[:, None] + step, step < places.num_tokens[:, None]
    return [write_ring(old, values, *place) for old, values in zip(rings, new, strict=True)]


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
