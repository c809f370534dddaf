"""The moving average in plain JAX, by the loops that all recurrences share."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas import row_loop
from kernels_pallas.places import Rows, Tiles
from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32


def average_scan(
    x: Float[Array, "tiles tile_size heads head_dim"],
    dt: Float[Array, "tiles tile_size heads"],
    rate: Float[Array, " heads"],
    store: Float[Array, "slots heads head_dim"],
    tiles: Tiles,
) -> tuple[Float[Array, "tiles tile_size heads head_dim"], Float[Array, "slots heads head_dim"]]:
    """Rows cut into tiles, from states in the store to states in the store; as `recurrence_scan`."""
    block, real = partial(_block, rate), (dt != 0).any(axis=2)
    return scan_tiles(block, (x, dt), real, x, store, tiles, size=x.shape[1])


def average_update(
    x: Float[Array, "rows steps heads head_dim"],
    dt: Float[Array, "rows steps heads"],
    rate: Float[Array, " heads"],
    store: Float[Array, "slots heads head_dim"],
    rows: Rows,
) -> tuple[Float[Array, "rows steps heads head_dim"], Float[Array, "slots heads head_dim"]]:
    """A few steps of each row; the state after step t goes to `rows.write_slot[:, t]`. As `recurrence_update`."""

    def token(state, x, dt):
        state = _step(rate, state.astype(F32), x, dt).astype(state.dtype)
        return state, state.astype(F32)

    y, store = row_loop.row_blocks(token, (x, dt), store, rows)
    return y.astype(x.dtype), store


def average_sequence(
    x: Float[Array, "batch length heads head_dim"], dt: Float[Array, "batch length heads"], rate: Float[Array, " heads"]
) -> Float[Array, "batch length heads head_dim"]:
    """Whole sequences from their first token, without a store; differentiable."""
    return scan_sequence(partial(_block, rate), (x, dt), x, jnp.zeros((x.shape[0], *x.shape[2:]), F32), size=64)[0]


def _block(rate, state, x, dt):
    """Some consecutive tokens of a row: x [size, heads, head_dim], dt [size, heads], state [heads, head_dim]."""

    def token(state, given):
        state = _step(rate, state, *given)
        return state, state

    return lax.scan(token, state, (x.astype(F32), dt))


def _step(rate, state, x, dt):
    keep = jnp.exp(-rate * dt.astype(F32))[:, None]
    return keep * state + (1 - keep) * x
