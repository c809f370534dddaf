"""Calls of the recurrences: scans, updates and replays, alone and with what lies between a layer's projections."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels_pallas import gated_recurrence, recurrence, selective_scan
from kernels_pallas.gated_recurrence import DeltaGates, Mamba2Gates, Projections, Weights, Windows
from kernels_pallas.places import Anchored, Rows, Tiles
from kernels_pallas.recurrence import Entry, Tail
from kernels_pallas.selective_scan import SelectiveEntry, SelectiveTail
from mamba_jax.layout import PrefillLayout
from tests.kernels_pallas.calls.call import Call, Draw, i32, nbytes, slot_bytes

WIDTH = 4
"""Of the convolutions of gated delta nets."""


# Inputs of tokens [*lead].


def _entry(draw: Draw, shape: Any, *lead: int) -> Entry:
    query, key = (draw(*lead, shape.groups, shape.state) / shape.state**0.5 for _ in range(2))
    heads = *lead, shape.heads
    decays = (*heads, shape.state) if shape.by_channel else heads
    return Entry(query, key, draw(*heads, shape.head_dim), -draw.positive(*decays), draw.positive(*heads))


def _skip(draw: Draw, shape: Any) -> dict[str, Any]:
    return {} if shape.erase else {"skip": draw.positive(shape.heads)}


def _selective_entry(draw: Draw, shape: Any, *lead: int) -> SelectiveEntry:
    b, c = (draw(*lead, shape.state) for _ in range(2))
    return SelectiveEntry(draw(*lead, shape.inner), b, c, draw.positive(*lead, shape.inner))


def _selective_weights(draw: Draw, shape: Any) -> dict[str, Any]:
    return {"a": -draw.positive(shape.state, shape.inner), "d": draw.positive(shape.inner)}


def _between_inputs(draw: Draw, shape: Any) -> tuple[Any, ...]:
    """Projections and weights of `gated_update`."""
    lead, inner, channels = (shape.rows, shape.steps), shape.heads * shape.head_dim, 2 * shape.groups * shape.state
    decays, width = shape.heads * (shape.state if shape.by_channel else 1), getattr(shape, "width", WIDTH)
    of_values, of_vectors = (
        (draw(n, width), draw(n) if getattr(shape, "bias", False) else None) for n in (inner, channels)
    )
    norm = draw(shape.head_dim if shape.erase else inner) if getattr(shape, "norm", True) else None
    projections = Projections(
        draw(*lead, inner),
        draw(*lead, inner),
        draw(*lead, 2, shape.groups, shape.state),
        draw(*lead, decays, dtype=jnp.float32) if shape.erase else None,
        draw(*lead, shape.heads, dtype=jnp.float32),
    )
    skip = None if shape.erase else draw.positive(shape.heads)
    weights = draw.positive(shape.heads), draw.positive(decays), skip, *of_values, *of_vectors, norm
    return projections, Weights(*weights)


def _gates(shape: Any) -> Any:
    if shape.erase:
        return DeltaGates(beta_scale=1.0, log_decay_bound=None, activation="silu", eps=1e-6)
    return Mamba2Gates((1e-3, math.inf), 1e-5, getattr(shape, "norm_before_gate", False))


# Places.


def _tiles(shape: Any) -> Tiles:
    """One row, from slot 1 to slot 2."""
    write_slot = i32([0] * (shape.tiles - 1) + [2])
    return Tiles(jnp.arange(shape.tiles) == 0, jnp.full(shape.tiles, 1, jnp.int32), write_slot)


def _a_slot_for_each_step(shape: Any) -> tuple[Rows, int]:
    """Where rows read and write, and how many slots that takes."""
    write = 1 + np.arange(shape.rows * shape.steps).reshape(shape.rows, shape.steps)
    return Rows(i32(write[:, 0]), i32(write)), write.size + 1


def _anchors(shape: Any, states: Any, tail: Any) -> tuple[Anchored, int]:
    """Rows at every place between two boundaries, so that as many reach theirs as in the long run; what they move."""
    row, interval = np.arange(shape.rows), shape.interval
    since = row * interval // shape.rows
    numbers = (1 + row, 1 + row, interval + 0 * row, interval + since, shape.steps + 0 * row, 1 + shape.rows + row)
    due = int((since + shape.steps >= interval).sum())
    of_token = sum(slot_bytes(ring) // ring.shape[1] for ring in tail if ring is not None)
    return Anchored(*map(i32, numbers), interval), slot_bytes(states) * (shape.rows + due) + of_token * int(
        (since + shape.steps).sum()
    )


def _tail(draw: Draw, shape: Any) -> Tail:
    ring, decays = (shape.rows + 1, shape.entries), shape.heads * (shape.state if shape.by_channel else 1)
    return Tail(
        draw(*ring, shape.heads * shape.head_dim, dtype=jnp.float32 if shape.erase else None),
        draw(*ring, shape.groups * shape.state),
        -draw.positive(*ring, decays),
        None if shape.erase else draw.positive(*ring, shape.heads),
    )


def _selective_tail(draw: Draw, shape: Any) -> Any:
    ring = shape.rows + 1, shape.entries
    return SelectiveTail(draw(*ring, shape.inner), draw(*ring, shape.state), draw.positive(*ring, shape.inner))


def scan_call(draw: Draw, shape: Any) -> Call:
    """One row of tiles, from a state and to a state."""
    entry, states = _entry(draw, shape, shape.tiles, shape.tile_size), draw.states(shape, 4)
    places = {"tiles": _tiles(shape), **_skip(draw, shape)}
    moved = nbytes(entry, entry.value) + 2 * slot_bytes(states)
    return Call(recurrence.recurrence_scan, (entry,), (states,), places, {"erase": shape.erase}, moved)


def update_call(draw: Draw, shape: Any) -> Call:
    """Rows that write a slot after each step."""
    (rows, slots), entry = _a_slot_for_each_step(shape), _entry(draw, shape, shape.rows, shape.steps)
    states = draw.states(shape, slots)
    places = {"rows": rows, **_skip(draw, shape)}
    moved = nbytes(entry, entry.value) + slot_bytes(states) * shape.rows * (1 + shape.steps)
    return Call(recurrence.recurrence_update, (entry,), (states,), places, {"erase": shape.erase}, moved)


def replay_call(draw: Draw, shape: Any) -> Call:
    """Rows that are held by anchors."""
    entry, tail = _entry(draw, shape, shape.rows, shape.steps), _tail(draw, shape)
    states = draw.states(shape, 2 * shape.rows + 1)
    anchored, moved = _anchors(shape, states, tail)
    places, moved = {"places": anchored, **_skip(draw, shape)}, moved + nbytes(entry, entry.value)
    return Call(recurrence.recurrence_replay, (entry,), (states, tail), places, {"erase": shape.erase}, moved)


def _channels(shape: Any) -> tuple[int, int]:
    """Of both convolutions."""
    return shape.heads * shape.head_dim, 2 * shape.groups * shape.state


def gated_update_call(draw: Draw, shape: Any) -> Call:
    """Rows that write a slot after each step."""
    inputs, (rows, slots), width = _between_inputs(draw, shape), _a_slot_for_each_step(shape), _width(shape)
    states = draw.states(shape, slots)
    windows = Windows(*(draw(len(states), width - 1, n) for n in _channels(shape)))
    moved = nbytes(inputs) + sum(map(slot_bytes, (states, *windows[:2]))) * shape.rows * (1 + shape.steps)
    places = {"rows": rows, "valid": jnp.ones((shape.rows, shape.steps), bool)}
    options = {"gates": _gates(shape)}
    return Call(gated_recurrence.gated_update, inputs, (states, windows), places, options, moved)


def gated_replay_call(draw: Draw, shape: Any) -> Call:
    """Rows that are held by anchors."""
    inputs, tail, slots, width = _between_inputs(draw, shape), _tail(draw, shape), 2 * shape.rows + 1, _width(shape)
    entries, states = 1 << (width + shape.steps - 3).bit_length(), draw.states(shape, slots)
    in_slots = [draw(len(states), width - 1, n) for n in _channels(shape)]
    windows = Windows(*in_slots, *(draw(shape.rows + 1, entries, n) for n in _channels(shape)))
    anchored, moved = _anchors(shape, states, tail)
    moved += nbytes(inputs) + sum(map(slot_bytes, windows)) * shape.rows
    places, options = {"places": anchored}, {"gates": _gates(shape)}
    return Call(gated_recurrence.gated_replay, inputs, (states, tail, windows), places, options, moved)


def _width(shape: Any) -> int:
    return getattr(shape, "width", WIDTH)


def selective_scan_call(draw: Draw, shape: Any) -> Call:
    """As `scan_call`."""
    entry, states = _selective_entry(draw, shape, shape.tiles, shape.tile_size), draw.states(shape, 4)
    places = {"tiles": _tiles(shape), **_selective_weights(draw, shape)}
    moved = nbytes(entry, entry.x) + 2 * slot_bytes(states)
    return Call(selective_scan.selective_scan, (entry,), (states,), places, moved=moved)


def selective_update_call(draw: Draw, shape: Any) -> Call:
    """As `update_call`."""
    (rows, slots), entry = _a_slot_for_each_step(shape), _selective_entry(draw, shape, shape.rows, shape.steps)
    states, places = draw.states(shape, slots), {"rows": rows, **_selective_weights(draw, shape)}
    moved = nbytes(entry, entry.x) + slot_bytes(states) * shape.rows * (1 + shape.steps)
    return Call(selective_scan.selective_update, (entry,), (states,), places, moved=moved)


def selective_replay_call(draw: Draw, shape: Any) -> Call:
    """As `replay_call`."""
    entry, tail = _selective_entry(draw, shape, shape.rows, shape.steps), _selective_tail(draw, shape)
    states = draw.states(shape, 2 * shape.rows + 1)
    anchored, moved = _anchors(shape, states, tail)
    places, moved = {"places": anchored, **_selective_weights(draw, shape)}, moved + nbytes(entry, entry.x)
    return Call(selective_scan.selective_replay, (entry,), (states, tail), places, moved=moved)


def gated_scan_call(draw: Draw, shape: Any) -> Call:
    """One row, of so many tokens as its tiles have."""
    tokens, inner = shape.tiles * shape.tile_size, shape.heads * shape.head_dim
    zx, vectors = draw(tokens, 2, inner), [draw(tokens, shape.groups, shape.state) for _ in range(2)]
    decays = -draw.positive(tokens, shape.heads), draw.positive(tokens, shape.heads)
    _, weights = _between_inputs(draw, dataclasses.replace(shape, rows=1, steps=1))
    states = draw.states(shape, 4)
    stores = states, draw(states.shape[0], shape.width - 1, inner)
    layout = PrefillLayout.of(
        num_packed=tokens,
        tile_size=shape.tile_size,
        length=i32([tokens]),
        num_tokens=i32([tokens]),
        read_slot=i32([1]),
        tile_write_slot=i32([0] * (shape.tiles - 1) + [2]),
        page_table=i32([[0]]),
    )
    moved = nbytes(zx, zx) * 3 // 4 + nbytes(decays, vectors) + 2 * sum(map(slot_bytes, stores))
    places, options = {"packed": layout.packed}, {"gates": _gates(shape)}
    return Call(gated_recurrence.gated_scan, (zx, *vectors, *decays, weights), stores, places, options, moved)
