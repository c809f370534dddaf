"""Calls of the recurrences: scans, updates and replays, alone and with what lies between a layer's projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.call import Call, Draw, i32, nbytes, slot_bytes
from kernels_pallas import delta_replay, gated_delta_update, gated_scan, state_replay
from mamba_jax.layout import PrefillLayout

WIDTH = 4
"""Of the convolutions of gated delta nets."""


# Inputs of tokens [*lead].


def _mamba2_inputs(draw: Draw, shape: Any, *lead: int) -> tuple[Any, ...]:
    x, (b, c) = draw(*lead, shape.heads, shape.head_dim), (draw(*lead, shape.groups, shape.state) for _ in range(2))
    return x, draw.positive(*lead, shape.heads), -draw.positive(shape.heads), b, c, draw.positive(shape.heads)


def _delta_inputs(draw: Draw, shape: Any, *lead: int) -> tuple[Any, ...]:
    q, k = (draw(*lead, shape.groups, shape.state) / shape.state**0.5 for _ in range(2))
    v, heads = draw(*lead, shape.heads, shape.head_dim), (*lead, shape.heads)
    gates = (*heads, shape.state) if shape.by_channel else heads
    return q, k, v, -draw.positive(*gates), draw.positive(*heads)


def _selective_inputs(draw: Draw, shape: Any, *lead: int) -> tuple[Any, ...]:
    x, (b, c) = draw(*lead, shape.inner), (draw(*lead, shape.state) for _ in range(2))
    a, d = -draw.positive(shape.state, shape.inner), draw.positive(shape.inner)
    return x, draw.positive(*lead, shape.inner), a, b, c, d


def _gated_inputs(draw: Draw, shape: Any) -> tuple[Any, ...]:
    """Of `gated_update`."""
    lead, inner, channels = (shape.rows, shape.steps), shape.heads * shape.head_dim, 2 * shape.groups * shape.state
    of_x, of_bc = ((draw(n, shape.width), draw(n) if shape.bias else None) for n in (inner, channels))
    return (
        draw(*lead, 2, inner), draw(*lead, 2, shape.groups, shape.state), draw(*lead, shape.heads, dtype=jnp.float32),
        *(draw.positive(shape.heads) for _ in range(3)), *of_x, *of_bc, draw(inner) if shape.norm else None,
    )  # fmt: skip


def _gated_delta_inputs(draw: Draw, shape: Any) -> tuple[Any, ...]:
    """Of `gated_delta_update`."""
    lead, inner, channels = (shape.rows, shape.steps), shape.heads * shape.head_dim, 2 * shape.groups * shape.state
    decays = shape.heads * (shape.state if shape.by_channel else 1)
    return (
        draw(*lead, 2, shape.groups, shape.state), draw(*lead, inner), draw(*lead, inner),
        *(draw(*lead, n, dtype=jnp.float32) for n in (decays, shape.heads)),
        draw.positive(shape.heads), draw.positive(decays),
        draw(inner, WIDTH), draw(channels, WIDTH), draw(shape.head_dim),
    )  # fmt: skip


# Places.


def _one_row_of_tiles(shape: Any) -> dict[str, Any]:
    return {
        "tile_first": jnp.arange(shape.tiles) == 0,
        "read_slot": jnp.full(shape.tiles, 1, jnp.int32),
        "write_slot": i32([0] * (shape.tiles - 1) + [2]),
    }


def _a_slot_for_each_step(shape: Any) -> tuple[dict[str, Any], int]:
    """Where rows read and write, and how many slots that takes."""
    write = 1 + np.arange(shape.rows * shape.steps).reshape(shape.rows, shape.steps)
    return {"read_slot": i32(write[:, 0]), "write_slot": i32(write)}, write.size + 1


def _anchors(shape: Any, states: Any, tail: Any) -> tuple[dict[str, Any], int]:
    """Rows at every place between two boundaries, so that as many reach theirs as in the long run; what they move."""
    row, interval = np.arange(shape.rows), shape.interval
    since = row * interval // shape.rows
    places = {
        "anchor_slot": i32(1 + row),
        "tail_id": i32(1 + row),
        "anchor_length": i32(interval + 0 * row),
        "length": i32(interval + since),
        "num_tokens": i32(shape.steps + 0 * row),
        "write_slot": i32(1 + shape.rows + row),
    }
    due = int((since + shape.steps >= interval).sum())
    of_token = sum(slot_bytes(ring) // ring.shape[1] for ring in tail)
    return places, slot_bytes(states) * (shape.rows + due) + of_token * int((since + shape.steps).sum())


def _mamba2_tail(draw: Draw, shape: Any) -> Any:
    ring, inner = (shape.rows + 1, shape.entries), shape.heads * shape.head_dim
    return state_replay.Tail(
        draw(*ring, inner), draw(*ring, shape.groups * shape.state), draw.positive(*ring, shape.heads)
    )


def _delta_tail(draw: Draw, shape: Any) -> Any:
    ring, decays = (shape.rows + 1, shape.entries), shape.heads * (shape.state if shape.by_channel else 1)
    return delta_replay.DeltaTail(
        draw(*ring, shape.heads * shape.head_dim, dtype=jnp.float32),
        draw(*ring, shape.groups * shape.state),
        -draw.positive(*ring, decays),
    )


def _selective_tail(draw: Draw, shape: Any) -> Any:
    ring = shape.rows + 1, shape.entries
    return state_replay.Tail(draw(*ring, shape.inner), draw(*ring, shape.state), draw.positive(*ring, shape.inner))


@dataclass(frozen=True)
class Recurrence:
    """The arguments of a recurrence's scan, update and replay."""

    inputs: Callable[..., tuple[Any, ...]]
    """Of tokens [*lead], from (draw, shape, *lead)."""
    y: int
    """The input that y is like."""
    tail: Callable[[Draw, Any], Any]

    def scan(self, operation: Callable[..., Any]) -> Callable[[Draw, Any], Call]:
        """One row of tiles, from a state and to a state."""

        def call(draw: Draw, shape: Any) -> Call:
            inputs, states = self.inputs(draw, shape, shape.tiles, shape.tile_size), draw.states(shape, 4)
            moved = nbytes(inputs, inputs[self.y]) + 2 * slot_bytes(states)
            return Call(operation, inputs, (states,), _one_row_of_tiles(shape), moved=moved)

        return call

    def update(self, operation: Callable[..., Any]) -> Callable[[Draw, Any], Call]:
        """Rows that write a slot after each step."""

        def call(draw: Draw, shape: Any) -> Call:
            (places, slots), inputs = _a_slot_for_each_step(shape), self.inputs(draw, shape, shape.rows, shape.steps)
            states = draw.states(shape, slots)
            moved = nbytes(inputs, inputs[self.y]) + slot_bytes(states) * shape.rows * (1 + shape.steps)
            return Call(operation, inputs, (states,), places, moved=moved)

        return call

    def replay(self, operation: Callable[..., Any]) -> Callable[[Draw, Any], Call]:
        """Rows that are held by anchors."""

        def call(draw: Draw, shape: Any) -> Call:
            inputs, tail = self.inputs(draw, shape, shape.rows, shape.steps), self.tail(draw, shape)
            states = draw.states(shape, 2 * shape.rows + 1)
            places, moved = _anchors(shape, states, tail)
            options, moved = {"interval": shape.interval}, moved + nbytes(inputs, inputs[self.y])
            return Call(operation, inputs, (states, tail), places, options, moved, stores_first=True)

        return call


MAMBA2 = Recurrence(_mamba2_inputs, 0, _mamba2_tail)
DELTA = Recurrence(_delta_inputs, 2, _delta_tail)
SELECTIVE = Recurrence(_selective_inputs, 0, _selective_tail)


@dataclass(frozen=True)
class BetweenProjections:
    """The arguments of what lies between the projections of a layer in decode."""

    inputs: Callable[[Draw, Any], tuple[Any, ...]]
    options: Mapping[str, Any]
    tail: Callable[[Draw, Any], Any]

    def _windows(self, shape: Any) -> tuple[int, tuple[int, int]]:
        """Width of both convolutions, and the channels of each."""
        return getattr(shape, "width", WIDTH), (shape.heads * shape.head_dim, 2 * shape.groups * shape.state)

    def update(self, operation: Callable[..., Any]) -> Callable[[Draw, Any], Call]:
        """Rows that write a slot after each step."""

        def call(draw: Draw, shape: Any) -> Call:
            inputs, (places, slots) = self.inputs(draw, shape), _a_slot_for_each_step(shape)
            width, channels = self._windows(shape)
            states = draw.states(shape, slots)
            stores = states, *(draw(len(states), width - 1, n) for n in channels)
            moved = nbytes(inputs) + sum(map(slot_bytes, stores)) * shape.rows * (1 + shape.steps)
            places["valid"] = jnp.ones((shape.rows, shape.steps), bool)
            return Call(operation, inputs, stores, places, self.options, moved)

        return call

    def replay(self, operation: Callable[..., Any]) -> Callable[[Draw, Any], Call]:
        """Rows that are held by anchors."""

        def call(draw: Draw, shape: Any) -> Call:
            inputs, tail, slots = self.inputs(draw, shape), self.tail(draw, shape), 2 * shape.rows + 1
            width, channels = self._windows(shape)
            entries, states = 1 << (width + shape.steps - 3).bit_length(), draw.states(shape, slots)
            rings = [(draw(len(states), width - 1, n), draw(shape.rows + 1, entries, n)) for n in channels]
            windows = [one for pair in rings for one in pair]
            places, moved = _anchors(shape, states, tail)
            moved += nbytes(inputs) + sum(map(slot_bytes, windows)) * shape.rows
            options = {**self.options, "interval": shape.interval}
            return Call(operation, inputs, (states, tail, *windows), places, options, moved)

        return call


GATED = BetweenProjections(_gated_inputs, {"eps": 1e-5, "dt_limit": (1e-3, math.inf)}, _mamba2_tail)
GATED_DELTA = BetweenProjections(
    _gated_delta_inputs,
    {"gates": gated_delta_update.Gates(beta_scale=1.0, log_decay_bound=None, output="silu", eps=1e-6)},
    _delta_tail,
)


def gated_scan_call(draw: Draw, shape: Any) -> Call:
    """One row, of so many tokens as its tiles have."""
    tokens, inner = shape.tiles * shape.tile_size, shape.heads * shape.head_dim
    zx, (b, c) = draw(tokens, 2, inner), (draw(tokens, shape.groups, shape.state) for _ in range(2))
    heads = draw.positive(tokens, shape.heads), -draw.positive(shape.heads)
    weights = draw(inner, shape.width), draw(inner) if shape.bias else None, draw(inner) if shape.norm else None
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
    moved = nbytes(zx, zx) * 3 // 4 + nbytes(heads[0], b, c) + 2 * sum(map(slot_bytes, stores))
    options = {"eps": 1e-5, "norm_before_gate": shape.norm_before_gate}
    inputs = zx, *heads, b, c, draw.positive(shape.heads), *weights
    return Call(gated_scan.gated_scan, inputs, stores, layout.places, options, moved)
