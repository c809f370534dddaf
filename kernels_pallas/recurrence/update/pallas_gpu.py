"""The update as one Triton kernel: each program takes some channels of one head of one row through all steps.

What a state holds of some channels depends on no other, so it comes from its slot into registers once, and goes out
after every step. Keys whose size is no power of two go in pieces.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import triton_blocks as triton
from kernels_pallas.triton_decode import F32, SlotRow, indices


def unsupported(entry, store, rows, *, erase, skip):
    return triton.unsupported(entry.key.shape[3], store)


def update(entry, store, rows, *, erase, skip, interpret=False):
    value, decays = entry.value, entry.log_decay.astype(F32)
    block = triton.power_of_two_in(value.shape[3], triton.CHANNELS)
    return triton.update_call(
        functools.partial(_kernel, block=block, repeats=entry.repeats, erase=erase),
        "recurrence_update",
        (value.shape[0], value.shape[2], value.shape[3] // block),
        (
            [slot.astype(jnp.int32) for slot in (rows.read_slot, rows.write_slot)],
            *(entry._replace(log_decay=decays, strength=entry.strength.astype(F32)), skip),
        ),
        jax.ShapeDtypeStruct(value.shape, value.dtype),
        (store,),
        interpret=interpret,
    )


def _kernel(slots, entry, skip, state_in, y, state_out, *, block: int, repeats: int, erase: bool):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place, here = SlotRow(row, *slots), pl.ds(part * block, block)

    def token(t):
        # A step is real if any head's strength is not 0. Found here, because it would be another kernel in front.
        return load_token(triton.any_nonzero(entry.strength, row, t), t, here, entry, repeats)

    def write_y(t, out):
        plt.store(y.at[row, t, head, here], out.astype(y.dtype))

    state, tokens = load_state(place, state_in, head, here), map(token, indices(y.shape[1]))
    weight = None if skip is None else plt.load(skip.at[head]).astype(F32)
    update_head(place, state, tokens, weight, state_out, write_y, erase=erase)


def load_token(live, t, here, entry, repeats):
    """Loads value, query, key, strength and logs of decays of a token, for some channels of the program's head: zeros
    where it is not `live`. Query and key are in pieces, and so are logs, or one number of the head.
    """
    (query, key, value, log_decay, strength), (row, head) = entry, (pl.program_id(axis) for axis in range(2))
    group, cut = lax.div(head, repeats), triton.pieces(key.shape[3])
    # Padding may hold NaN, and 0 * NaN is NaN: its values are masked.
    values = triton.load_if(live, value.at[row, t, head, here], here.size).astype(F32)
    queries, keys = (
        [triton.load_if(live, v.at[row, t, group, n], n.size).astype(F32) for n in cut] for v in (query, key)
    )
    of_decays = [[head, n] for n in cut] if len(log_decay.shape) == 4 else [[head]]
    logs = [jnp.where(live, plt.load(log_decay.at[row, t, *at]), 0.0) for at in of_decays]
    return values, queries, keys, jnp.where(live, plt.load(strength.at[row, t, head]), 0.0), logs


def load_state(place, state_in, head, here):
    """Loads the channels `here` of a head's state, in pieces: zeros without a slot."""
    return [
        triton.load_if(place.source > 0, state_in.at[place.source, head, here, n], here.size, n.size).astype(F32)
        for n in triton.pieces(state_in.shape[3])
    ]


def update_head(place, state, tokens, skip, state_out, write_y, *, erase):
    """Runs some channels of the program's head through all steps, inside a kernel.

    Args:
        place: `SlotRow`.
        state: by `load_state`.
        tokens: by `load_token`, of each step.
        skip: of the head; None if there is none.
        write_y: takes a step and its output.
    """
    head, block = pl.program_id(1), state[0].shape[0]
    here, cut = pl.ds(pl.program_id(2) * block, block), triton.pieces(state_out.shape[3])
    for n, (value, query, key, strength, logs) in enumerate(tokens):
        t, old = jnp.int32(n), triton.decayed(state, logs)
        added = strength * (value - triton.product_with(old, key) if erase else value)
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = [
            (piece + added[:, None] * k[None, :]).astype(state_out.dtype) for piece, k in zip(old, key, strict=True)
        ]
        state = [piece.astype(F32) for piece in stored]
        out = triton.product_with(state, query)
        write_y(t, out if skip is None else out + skip * value)
        target = place.target(t)
        for at, piece in zip(cut, stored, strict=True):
            triton.store_if(target > 0, state_out.at[target, head, here, at], piece)
