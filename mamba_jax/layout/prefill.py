"""The tokens of a prefill step: ragged rows packed one after the other; scan and attention see them as tiles."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from kernels_pallas.places import Packed, Tiles
from mamba_jax.layout.base import Inputs, Operation, Parameters
from mamba_jax.layout.paged import PagedTokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillLayout(PagedTokens):
    """T packed tokens of R rows, and the tiles that they are cut into at absolute multiples of the tile size."""

    packed: Packed
    """The places of the tokens, of the tiles and of their states. A tile is its row's first of this step."""
    written: Int[Array, " writes"]
    """Indices of the tiles with a slot to write, then of any."""
    slow_links: bool = field(default=False, kw_only=True, metadata={"static": True})
    """Members that divide the tokens should exchange little."""

    @classmethod
    def of(
        cls,
        *,
        num_packed: int,
        tile_size: int,
        length: Int[Array, " rows"],
        num_tokens: Int[Array, " rows"],
        read_slot: Int[Array, " rows"],
        tile_write_slot: Int[Array, " tiles"],
        page_table: Int[Array, "rows pages"],
        most_writes: int | None = None,
    ) -> Self:
        """Returns the layout of rows that have absorbed `length` tokens and are fed `num_tokens` more.

        `num_packed` is T, at least the sum of `num_tokens`. There must be room for every row's tiles. `most_writes`:
        of how many tiles the slot to write may not be 0; None: of all.
        """
        rows, tiles = length.shape[0], tile_write_slot.shape[0]
        row_end = jnp.cumsum(num_tokens)
        row_start = row_end - num_tokens
        read_slot = jnp.where(num_tokens > 0, read_slot, 0)

        token = jnp.arange(num_packed)
        # An empty row ends where it starts, so "right" skips it. A binary search would be a loop, which a GPU runs step
        # by step from the host.
        token_row = jnp.minimum(jnp.searchsorted(row_end, token, side="right", method="compare_all"), rows - 1)
        valid = token < row_end[-1]
        position = length[token_row] + token - row_start[token_row]

        # Tiles are numbered, for each row, from the absolute tile that its first token falls in.
        first_absolute = length // tile_size
        row_tiles = jnp.where(num_tokens > 0, -(-(length + num_tokens) // tile_size) - first_absolute, 0)
        row_tile_end = jnp.cumsum(row_tiles)
        row_tile_start = row_tile_end - row_tiles

        tile = jnp.arange(tiles)
        tile_row = jnp.minimum(jnp.searchsorted(row_tile_end, tile, side="right", method="compare_all"), rows - 1)
        tile_real = tile < row_tile_end[-1]
        row_length, row_tokens = length[tile_row], num_tokens[tile_row]
        absolute = (first_absolute[tile_row] + tile - row_tile_start[tile_row]) * tile_size
        begin = jnp.maximum(absolute - row_length, 0)
        end = jnp.where(tile_real, jnp.minimum(absolute + tile_size - row_length, row_tokens), 0)
        tile_first = ~tile_real | (tile == row_tile_start[tile_row])

        lane = jnp.arange(tile_size)
        tile_tokens = row_start[tile_row][:, None] + begin[:, None] + lane
        token_tile = row_tile_start[token_row] + position // tile_size - first_absolute[token_row]
        token_lane = jnp.where(
            token_tile == row_tile_start[token_row], token - row_start[token_row], position % tile_size
        )
        write_slot = jnp.where(tile_real, tile_write_slot, 0)
        nth = 1 + jnp.arange(tiles if most_writes is None else most_writes)
        written = jnp.searchsorted(jnp.cumsum(write_slot > 0)[:-1], nth, method="compare_all")
        packed = Packed(
            token_row=token_row,
            token_in_tiles=jnp.where(valid, token_tile * tile_size + token_lane, 0),
            row_start=row_start,
            read_slot=read_slot,
            tile_row=tile_row,
            tile_end=end,
            tile_tokens=jnp.minimum(tile_tokens, num_packed - 1),
            tile_valid=begin[:, None] + lane < end[:, None],
            tiles=Tiles(
                first=tile_first,
                read_slot=jnp.where(tile_real & tile_first, read_slot[tile_row], 0),
                write_slot=write_slot,
            ),
        )
        return cls(jnp.where(valid, position, -1), valid, read_slot, page_table, packed, written)

    def with_adapters(self, entry: Int[Array, " rows"]) -> Self:
        """Returns the layout of rows that have these adapters."""
        return replace(self, adapter=entry[self.packed.token_row])

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        return operation.tiles(self, inputs, parameters, state)

    def row_of_each(self) -> Int[Array, " T"]:
        return self.packed.token_row

    def query_blocks(self) -> tuple[Int[Array, "tiles tile_size"], Int[Array, " tiles"]]:
        packed = self.packed
        return jnp.where(packed.tile_valid, self.positions[packed.tile_tokens], -1), packed.tile_row

    def by_block(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "tiles tile_size ..."]:
        return self.by_tile(x)

    def by_tile(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "tiles tile_size ..."]:
        """Packed tokens as tiles. Padding is zeros."""
        valid = self.packed.tile_valid.reshape(*self.packed.tile_valid.shape, *[1] * (x.ndim - 1))
        return jnp.where(valid, self.gather_unmasked(x), 0)

    def gather_unmasked(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "tiles tile_size ..."]:
        """Packed tokens as tiles. Padding is some token of the step, for operations that do not read it."""
        return _flat(x)[self.packed.tile_tokens].reshape(*self.packed.tile_tokens.shape, *x.shape[1:])

    def by_token(self, tiles: Shaped[Array, "tiles tile_size ..."]) -> Shaped[Array, "T ..."]:
        """Converts tiles back to packed tokens."""
        last = tiles.shape[2:]
        return _flat(tiles.reshape(-1, *last))[self.packed.token_in_tiles].reshape(-1, *last)


def _flat(x: Shaped[Array, "T ..."]) -> Shaped[Array, "T channels"]:
    """Flattens to one row per token before a gather: a TPU would pad heads with fewer than 128 channels to 128."""
    return x.reshape(len(x), math.prod(x.shape[1:]))
