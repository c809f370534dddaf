"""The recurrence for schedule-invariant programs of TPU and GPU: by the update's kernel, with one token of a row in
each call, in prefill as in decode. Every token is then computed by the same instructions.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import fixed_order
from kernels_pallas.places import Rows, Tiles
from kernels_pallas.recurrence.update import pallas_gpu, pallas_tpu
from kernels_pallas.row_loop import sequences_in_slots
from kernels_pallas.slots import load, put, read_slots, write_slots
from kernels_pallas.tile_loop import scan_tiles

KERNELS = {"tpu": pallas_tpu, "gpu": pallas_gpu}


def update(entry, store, rows, *, erase, skip):
    """See `api.recurrence_update`."""
    one = functools.partial(_one_token, erase=erase, skip=skip)
    if rows.write_slot.shape[1] == 1:
        return one(entry, store, rows)
    held, out = jnp.pad(read_slots(store, rows.read_slot), ((1, 0), (0, 0), (0, 0), (0, 0))), []
    place = jnp.arange(1, len(held))
    for t in range(rows.write_slot.shape[1]):
        y, held = one(jax.tree.map(lambda v, t=t: v[:, t : t + 1], entry), held, Rows(place, place[:, None]))
        store = write_slots(store, held[1:], rows.write_slot[:, t])
        out.append(y)
    return jnp.concatenate(out, axis=1), store


def scan(entry, store, tiles, *, erase, skip):
    """See `api.recurrence_scan`."""
    tile_size, only = entry.value.shape[1], Rows(jnp.ones(1, jnp.int32), jnp.ones((1, 1), jnp.int32))

    def tile(state, *tokens):
        def token(t, carry):
            held, y = carry
            given = type(entry)(*(load(v, t)[None, None] for v in tokens))
            out, held = _one_token(given, held, only, erase=erase, skip=skip)
            return held, put(y, out[0, 0], t)

        held = jnp.stack([jnp.zeros_like(state), state])
        held, y = lax.fori_loop(0, tile_size, token, (held, jnp.zeros(entry.value.shape[1:], entry.value.dtype)))
        return held[1], y

    return scan_tiles(tile, entry, entry.real, entry.value, store, tiles, size=tile_size)


def sequence(entry, *, erase, skip, initial_state, chunk_size):
    """See `api.recurrence_sequence`; `chunk_size` has no effect."""
    store, rows = sequences_in_slots(entry.value.shape[1], initial_state.astype(jnp.float32))
    tiles = Tiles(jnp.ones(len(initial_state), bool), rows.read_slot, rows.read_slot)
    y, store = scan(entry, store, tiles, erase=erase, skip=skip)
    return y, store[1:]


def unsupported(entry, store=None, places=None, *, erase, skip, **_):
    """Why the update's kernel does not take these shapes; `store` is None for whole sequences."""
    options = fixed_order.kernel_options() or {}
    states = (len(entry.value), *entry.value.shape[2:], entry.key.shape[-1])
    store = jax.ShapeDtypeStruct(states, jnp.float32) if store is None else store
    return KERNELS[options["platform"]].unsupported(entry, store, places, erase=erase, skip=skip)


def _one_token(entry, store, rows, *, erase, skip):
    options = fixed_order.kernel_options() or {}
    return KERNELS[options["platform"]].update(
        entry, store, rows, erase=erase, skip=skip, interpret=options["interpret"]
    )
