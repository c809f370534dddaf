"""Chunked scans of any recurrence in plain JAX: a loop over blocks of tokens that carries the state along.

A recurrence is a function `block(state, *inputs) -> (state, y)`: it takes one row's state (float32) and the inputs of
some consecutive tokens, each [tokens, ...], and returns the state after them and their outputs, both float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import load, put, write_slot_if

F32 = jnp.float32


def scan_tiles(block, inputs, real, y, store, places, *, size, branch=False):
    """Scans tiles `size` tokens at a time. Loads states from the store and writes them to it, without other copies.

    Args:
        inputs: each [tiles, tile_size, ...].
        real: [tiles, tile_size], tokens that are not padding.
        y: [tiles, tile_size, ...]; only its shape and dtype are used, which are those of the outputs.
        size: a divisor of the tile size.
        branch: skip blocks that are only padding. A GPU's conditionals wait for the host and copy their results, so
            there padding is computed too (its inputs do not change the state).
    """
    tiles, tile_size = real.shape
    if not real.size:
        return jnp.zeros(y.shape, y.dtype), store
    per_tile = tile_size // size
    count = tiles * per_tile

    def spread(v, place):  # what concerns whole tiles, at the block in this place of each tile
        return jnp.zeros((tiles, per_tile), v.dtype).at[:, place].set(v).reshape(count)

    first, last = spread(places.first, 0), spread(jnp.ones(tiles, bool), -1)
    reads, writes = spread(places.read_slot, 0), spread(places.write_slot, -1)
    blocks = [v.reshape(count, size, *v.shape[2:]) for v in inputs]
    live = real.reshape(count, size).any(axis=1)

    def body(i, carry):
        store, state, y = carry

        def start():
            # A select, not a product: the null slot may hold NaN.
            return jnp.where(reads[i] > 0, load(store, reads[i]).astype(F32), 0)

        def run(state, y):
            state, out = block(state, *(load(v, i) for v in blocks))
            return state, put(y, out, i)

        if branch:
            state = lax.cond(first[i], start, lambda: state)
            state, y = lax.cond(live[i], run, lambda state, y: (state, y), state, y)
        else:
            state, y = run(jnp.where(first[i], start(), state), y)
        if store.dtype != F32:
            state = jnp.where(last[i], state.astype(store.dtype).astype(F32), state)
        return write_slot_if(store, state, writes[i]), state, y

    carry = store, jnp.zeros(store.shape[1:], F32), jnp.zeros((count, size, *y.shape[2:]), y.dtype)
    store, _, out = lax.fori_loop(0, count, body, carry)
    return out.reshape(y.shape), store


def scan_sequence(block, inputs, y, state, *, size):
    """Scans whole sequences [batch, length, ...] `size` tokens at a time; differentiable.

    Inputs of zeros must not change the state. Only the shape and dtype of y are used, which are those of the outputs.
    """
    batch, length = y.shape[:2]
    size = min(size, max(length, 1))
    chunks = -(-length // size)

    def cut(v):  # [batch, length, ...] -> [chunks, batch, size, ...]
        v = jnp.pad(v, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * (v.ndim - 2))
        return v.reshape(batch, chunks, size, *v.shape[2:]).swapaxes(0, 1)

    # Rematerialized: the gradient keeps one state per chunk and not the weights between all pairs of its tokens.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state, chunk):
        state, out = jax.vmap(block)(state, *chunk)
        return state, out.astype(y.dtype)

    state, out = lax.scan(step, state.astype(F32), tuple(cut(v) for v in inputs))
    return out.swapaxes(0, 1).reshape(batch, chunks * size, *y.shape[2:])[:, :length], state
