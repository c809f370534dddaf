"""The delta update as one Triton kernel: each program takes some channels of one head of one row through all steps.

Programs and slots are those of `kernels_pallas.state_update.pallas_gpu`: what a state holds of some channels depends on
no other, so it stays in registers from its slot through all steps. Keys whose size is no power of two go in pieces.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton_blocks import (
    LEAST_OF_PIECE,
    any_nonzero,
    load_if,
    offsets_overflow,
    pieces,
    power_of_two_in,
    product_with,
    store_if,
    update_call,
)  # fmt: skip

F32 = jnp.float32


def unsupported(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """Returns why this call cannot run, or None."""
    if 0 in (*v.shape, *k.shape):
        return "it is empty"
    if offsets_overflow(store):
        return "offsets into the store do not fit in 32 bits"
    if k.shape[3] % LEAST_OF_PIECE:
        return f"keys have a size of {k.shape[3]}, not a multiple of {LEAST_OF_PIECE}"
    return None


def delta_update(
    q, k, v, log_decay, beta, store, *, read_slot, write_slot, interpret=False, channels=32, warps=4
):  # fmt: skip
    """See `api.delta_update`. `channels` (at most, of a head) go into one program of `warps` warps."""
    rows, steps, heads, head_dim = v.shape
    block = power_of_two_in(head_dim, channels)
    slots = read_slot.astype(jnp.int32), write_slot.astype(jnp.int32)
    y, store = update_call(
        functools.partial(_kernel, steps=steps, block=block, repeats=heads // k.shape[2]),
        "delta_update",
        (rows, heads, head_dim // block),
        (*slots, q, k, v, log_decay.astype(F32), beta.astype(F32)),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        (store,),
        interpret=interpret,
        warps=warps,
    )
    return y, store


def _kernel(
    read_slot, write_slot, q, k, v, log_decay, beta, state_in, y, state_out, *, steps: int, block: int,
    repeats: int,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    group, here, inner = lax.div(head, repeats), pl.ds(part * block, block), pieces(state_in.shape[3])
    source, by_channel = plt.load(read_slot.at[row]), len(log_decay.shape) == 4
    state = [load_if(source > 0, state_in.at[source, head, here, n], block, n.size).astype(F32) for n in inner]
    for t in map(jnp.int32, range(steps)):  # the interpreter does not accept plain integers
        # Padding may hold NaN, and 0 * NaN is NaN: its values are masked.
        # A step is real if beta of any head is not 0. Found here, because it would be another kernel in front.
        live = any_nonzero(beta, row, t)
        values = load_if(live, v.at[row, t, head, here], block).astype(F32)
        queries, keys = ([load_if(live, one.at[row, t, group, n], n.size).astype(F32) for n in inner] for one in (q, k))
        # Of the head, or of each channel of its keys.
        logs = [log_decay.at[row, t, head, *([n] if by_channel else [])] for n in inner]
        old = [piece * jnp.exp(jnp.where(live, plt.load(log), 0.0)) for piece, log in zip(state, logs, strict=True)]
        error = values - product_with(old, keys)
        gained = plt.load(beta.at[row, t, head]) * error
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = [
            (piece + gained[:, None] * key[None, :]).astype(state_out.dtype)
            for piece, key in zip(old, keys, strict=True)
        ]
        state = [piece.astype(F32) for piece in stored]
        plt.store(y.at[row, t, head, here], product_with(state, queries).astype(y.dtype))
        target = plt.load(write_slot.at[row, t])
        for n, piece in zip(inner, stored, strict=True):
            store_if(target > 0, state_out.at[target, head, here, n], piece)
