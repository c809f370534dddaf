"""The scan in plain JAX: blocks of tokens as matrix products, the state carried from block to block."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import load, put, take, write_slot_if

F32 = jnp.float32
# Tokens per product on CPU: the work within a block grows with its square, and this many keep the products efficient.
CPU_BLOCK = 32


def ssd_scan(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """See `api.ssd_scan`. The blocking is chosen by the platform compiled for, which may not be the one at hand."""
    size = x.shape[1]
    small = max(n for n in range(1, min(size, CPU_BLOCK) + 1) if size % n == 0)
    arguments = x, dt, a, b, c, d, store, tile_first, read_slot, write_slot
    return lax.platform_dependent(
        *arguments, cpu=functools.partial(_scan_tiles, block=small), default=functools.partial(_scan_tiles, block=size)
    )


def ssd_scan_sequence(x, dt, a, b, c, d, *, initial_state=None, chunk_size=128):
    """See `api.ssd_scan_sequence`. On CPU, chunks are cut to `CPU_BLOCK` (see there)."""
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], *x.shape[2:], b.shape[-1]), F32)
    small, whole = (functools.partial(_scan_sequence, size=n) for n in (min(chunk_size, CPU_BLOCK), chunk_size))
    return lax.platform_dependent(x, dt, a, b, c, d, initial_state, cpu=small, default=whole)


def _scan_sequence(x, dt, a, b, c, d, state, *, size):
    batch, length, heads, head_dim = x.shape
    size = min(size, max(length, 1))
    chunks = -(-length // size)

    def cut(v):  # [batch, length, ...] -> [chunks, batch, size, ...]; the padding has dt = 0
        v = jnp.pad(v, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * (v.ndim - 2))
        return v.reshape(batch, chunks, size, *v.shape[2:]).swapaxes(0, 1)

    # Rematerialised: the gradient keeps one state per chunk and not the [heads, size, size] weights.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state, chunk):
        x, dt, b, c = chunk
        state, y = jax.vmap(_block, (0, 0, 0, None, 0, 0, None))(state, x, dt, a, b, c, d)
        return state, y.astype(x.dtype)

    state, y = lax.scan(step, state.astype(F32), tuple(cut(v) for v in (x, dt, b, c)))
    return y.swapaxes(0, 1).reshape(batch, chunks * size, heads, head_dim)[:, :length], state


def _scan_tiles(x, dt, a, b, c, d, store, tile_first, read_slot, write_slot, *, block):
    """A loop over blocks that loads states from the store and writes them to it as it goes, holding none aside."""
    tiles, size = x.shape[:2]
    per_tile = size // block
    count = tiles * per_tile

    def spread(v, place):  # what concerns whole tiles, at the block in this place of each tile
        return jnp.zeros((tiles, per_tile), v.dtype).at[:, place].set(v).reshape(count)

    first, last = spread(tile_first, 0), spread(jnp.ones(tiles, bool), -1)
    reads, writes = spread(read_slot, 0), spread(write_slot, -1)
    x_blocks, dt_blocks, b_blocks, c_blocks = (v.reshape(count, block, *v.shape[2:]) for v in (x, dt, b, c))

    def scan(source, index):
        """The loop's body. The state of a row that starts at block i is in source(store)[index[i]]."""

        def body(i, carry):
            store, state, y = carry

            def start():
                # A select, not a product: the null slot may hold NaN.
                return jnp.where(reads[i] > 0, load(source(store), index[i]).astype(F32), 0)

            def run(state, y):
                x, dt, b, c = (load(v, i) for v in (x_blocks, dt_blocks, b_blocks, c_blocks))
                state, out = _block(state, x, dt, a, b, c, d)
                return state, put(y, out, i)

            state = lax.cond(first[i], start, lambda: state)
            # Blocks of padding cost nothing.
            state, y = lax.cond((load(dt_blocks, i) != 0).any(), run, lambda state, y: (state, y), state, y)
            if store.dtype != F32:
                state = jnp.where(last[i], state.astype(store.dtype).astype(F32), state)
            return write_slot_if(store, state, writes[i]), state, y

        return body

    def read_first(_, carry):
        copies = take(carry[0], read_slot)
        return lax.fori_loop(0, count, scan(lambda _: copies, jnp.arange(count) // per_tile), carry)

    # A row that starts from what an earlier tile of this call writes needs all reads done first. That is rare, and the
    # copies cost time and memory: it has a loop of its own, of one round or none. (With `cond`, XLA:CPU copies the
    # store.)
    later = jnp.arange(tiles)[:, None] < jnp.arange(tiles)
    written = (write_slot[:, None] == read_slot) & (write_slot[:, None] > 0)
    clash = (written & later & tile_first).any().astype(jnp.int32)
    carry = store, jnp.zeros(store.shape[1:], F32), jnp.zeros(x_blocks.shape, x.dtype)
    carry = lax.fori_loop(0, clash, read_first, carry)
    store, _, y = lax.fori_loop(0, count * (1 - clash), scan(lambda store: store, reads), carry)
    return y.reshape(x.shape), store


def _block(state, x, dt, a, b, c, d):
    """A block of one row: state [heads, head_dim, state] f32, x [size, heads, head_dim], dt [size, heads], b and c
    [size, groups, state]. Returns the state after the block and y [size, heads, head_dim], both float32.

    The heads of a group stay together as axes (groups, repeats), so b and c are never repeated.
    """
    size, heads, head_dim = x.shape
    groups, repeats = b.shape[1], heads // b.shape[1]
    # In lower precisions the products may round as the model's own do.
    precision = lax.Precision.HIGHEST if x.dtype == F32 else lax.Precision.DEFAULT
    dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=precision)
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    real = (dt != 0).any(axis=1)[:, None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    b, c = b.swapaxes(0, 1), c.swapaxes(0, 1)
    dt, a, d = dt.astype(F32), a.astype(F32), d.astype(F32)
    decay = jnp.cumsum(dt * a, axis=0)  # the log of the decay from the block's start, [size, heads]
    by_head = decay.T.reshape(groups, repeats, size)

    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before exp: above the diagonal it could overflow, and its gradient would be NaN.
    within = jnp.exp(jnp.where(lower, by_head[..., :, None] - by_head[..., None, :], -jnp.inf))
    weights = dot("gqn,gkn->gqk", c, b)[:, None] * within
    fed = (x * dt[..., None]).swapaxes(0, 1)
    inside = dot("hqk,hkp->hqp", weights.reshape(heads, size, size), fed).swapaxes(0, 1)
    before = dot("gqn,gmn->gqm", c, state.reshape(groups, repeats * head_dim, -1))
    before = before.reshape(groups, size, repeats, head_dim).swapaxes(0, 1).reshape(x.shape)
    y = inside + before * jnp.exp(decay)[..., None] + x * d[:, None]

    to_end = x * (dt * jnp.exp(decay[-1] - decay))[..., None]
    to_end = to_end.reshape(size, groups, repeats * head_dim).swapaxes(0, 1)
    added = dot("gkm,gkn->gmn", to_end, b).reshape(state.shape)
    return state * jnp.exp(decay[-1])[:, None, None] + added, y
