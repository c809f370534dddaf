"""Where an operation's tokens lie, and which slots (`kernels_pallas.slots`) and tails their states are in.

One of these classes is an argument of every operation on states: `Tiles` or `Packed` in prefill, `Rows` in decode, and
`Anchored` in decode by replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Rows cut into tiles; the tiles of a row are consecutive."""

    first: Bool[Array, " tiles"]
    """The tile is its row's first: it starts from the state in `read_slot`. Others go on from the previous tile."""
    read_slot: Int[Array, " tiles"]
    """0 reads as zeros."""
    write_slot: Int[Array, " tiles"]
    """For the state after the tile; 0: nowhere."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Rows of a few tokens each."""

    read_slot: Int[Array, " rows"]
    """0 reads as zeros."""
    write_slot: Int[Array, "rows steps"]
    """For the state after each token; 0: nowhere."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Anchored:
    """Rows of a few tokens each, of which a state is stored (the anchor), and their inputs since then (the tail).

    A row of c tokens is S(a), a <= c, in a slot, and the inputs of tokens a .. c-1. A step appends its tokens to the
    tail, and writes a state only where they reach a multiple of the interval.
    """

    anchor_slot: Int[Array, " rows"]
    """0 reads as zeros (a fresh row, of length 0 or with all of its tokens in the tail)."""
    tail_id: Int[Array, " rows"]
    """0 for padding. No two rows share a tail, except for tail 0."""
    anchor_length: Int[Array, " rows"]
    """Tokens that the anchor has absorbed."""
    length: Int[Array, " rows"]
    """Tokens that the row has absorbed: those from anchor_length on are in its tail."""
    num_tokens: Int[Array, " rows"]
    """0 to steps; 0 is padding. Tokens beyond it may hold NaN; their y is 0."""
    write_slot: Int[Array, " rows"]
    """For S(m), where m is the next multiple of the interval, if it is reached; 0: nowhere."""
    interval: int = field(metadata={"static": True})
    """Tokens between two written states."""

    @property
    def boundary(self) -> Int[Array, " rows"]:
        """The next multiple of the interval after each row's length."""
        return (self.length // self.interval + 1) * self.interval

    @property
    def due_slot(self) -> Int[Array, " rows"]:
        """The slot for the state at the boundary; 0 where the new tokens do not reach it."""
        reached = (self.boundary <= self.length + self.num_tokens) & (self.num_tokens > 0)
        return jnp.where(reached, self.write_slot, 0)

    @property
    def live_anchor(self) -> Int[Array, " rows"]:
        """The slot to read; 0 for padding."""
        return jnp.where(self.num_tokens > 0, self.anchor_slot, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Tokens of ragged rows, packed one after the other from the first on, and divided into tiles.

    A row's tiles are consecutive, and so are the tokens of a row's tiles.
    """

    token_row: Int[Array, " tokens"]
    """The row of each token; any for padding."""
    token_in_tiles: Int[Array, " tokens"]
    """Where each token is in the flattened tiles; any place for padding."""
    row_start: Int[Array, " rows"]
    """Index of each row's first token."""
    read_slot: Int[Array, " rows"]
    """0 reads as zeros."""
    tile_row: Int[Array, " tiles"]
    tile_end: Int[Array, " tiles"]
    """How many of the row's tokens lie up to the tile's end."""
    tile_tokens: Int[Array, "tiles tile_size"]
    """Indices of the tiles' tokens; any for padding."""
    tile_valid: Bool[Array, "tiles tile_size"]
    """Which of them are tokens: those in front."""
    tiles: Tiles
    """A tile is also a first one if it is padding."""


def rows_of_tiles(tiles: Tiles, real: Bool[Array, "tiles tile_size"]) -> Rows:
    """Returns the tiles as rows of an update in C++, where a negative slot to read means the state of the row before.

    real: False for padding, which ends a tile.
    """
    last = jnp.maximum(real.sum(axis=1), 1) - 1
    write = jnp.where(jnp.arange(real.shape[1]) == last[:, None], tiles.write_slot[:, None], 0)
    return Rows(jnp.where(tiles.first, tiles.read_slot, -1), write)
