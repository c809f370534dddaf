"""The recurrence in C++, for CPU (`native/*.cc`): token by token, or from an anchor that is read once for all new
tokens.

Token by token, each state is read and written once, with rows of it in registers for all tokens in between. A scan then
takes less time than as products of blocks. The order of the sums is the same for any number of rows and tokens, which
schedule-invariant programs rely on.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import dispatch, fixed_order, native
from kernels_pallas.fixed_order import F32, exp, rounded
from kernels_pallas.places import rows_of_tiles
from kernels_pallas.recurrence import token_by_token
from kernels_pallas.row_loop import sequences_in_slots

_KNOWN = (F32, jnp.bfloat16)


def implementations(run, elsewhere, unsupported=None):
    """Returns the automatic entry of an operation's table, unless `unsupported` is None, and the invariant ones."""
    automatic = [] if unsupported is None else [dispatch.Implementation("native", run, unsupported, "cpu")]
    return (*automatic, *fixed_order.implementations(run, elsewhere, token_by_token.unsupported))


def update_unsupported(entry, store, places, *, erase, skip):
    if store.dtype not in _KNOWN:
        return f"states are {store.dtype}, not float32 or bfloat16"
    if erase and not native.has_wide_registers():
        return f"registers are narrow (instruction set {native.instructions()})"
    return native.WHY_MISSING


def scan_unsupported(entry, store, tiles, *, erase, skip):
    if store.dtype != F32:
        return f"states are {store.dtype}, not float32, and would be rounded after each token"
    return update_unsupported(entry, store, tiles, erase=erase, skip=skip)


def replay_unsupported(entry, store, tail, places, *, erase, skip):
    if erase or entry.by_channel:
        return "the recurrence erases" if erase else "channels decay on their own"
    if store.dtype not in _KNOWN:
        return f"states are {store.dtype}, not float32 or bfloat16"
    if tail.value.dtype not in _KNOWN or tail.key.dtype != tail.value.dtype or tail.strength.dtype != F32:
        return f"tails are {tail.value.dtype}, {tail.key.dtype} and {tail.strength.dtype}, not all float32 or bfloat16"
    return native.WHY_MISSING


def update(entry, store, rows, *, erase, skip):
    """See `api.recurrence_update`. A negative slot to read means the state of the row before."""
    query, key, value, _, strength = (v.astype(F32) for v in entry)
    decay = exp(rounded(entry.decays.astype(F32)))
    results = jax.ShapeDtypeStruct(value.shape, F32), jax.ShapeDtypeStruct(store.shape, store.dtype)
    call = jax.ffi.ffi_call(native.target("recurrence_update"), results, input_output_aliases={6: 1})
    slots = rows.read_slot.astype(jnp.int32), rows.write_slot.astype(jnp.int32)
    y, store = call(query, key, value, decay, strength, _weight(skip, value), store, *slots, erase=erase)
    return y.astype(entry.value.dtype), store


def scan(entry, store, tiles, *, erase, skip):
    return update(entry, store, rows_of_tiles(tiles, entry.real), erase=erase, skip=skip)


def sequence(entry, *, erase, skip, initial_state, chunk_size):
    """See `api.recurrence_sequence`; `chunk_size` has no effect."""
    store, rows = sequences_in_slots(entry.value.shape[1], initial_state.astype(F32))
    y, store = update(entry, store, rows, erase=erase, skip=skip)
    return y, store[1:]


def replay(entry, store, tail, places, *, erase, skip):
    stores = store, *tail
    results = [jax.ShapeDtypeStruct(entry.value.shape, F32), *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in stores)]
    call = jax.ffi.ffi_call(
        native.target("recurrence_replay"), results, input_output_aliases={i: 1 + i for i in range(len(stores))}
    )
    # Entries keep the tail's precision, so that a token counts alike in its own step and in later ones.
    kept = entry._replace(key=entry.key.astype(tail.key.dtype), value=entry.value.astype(tail.value.dtype))
    numbers = (*(v.astype(F32) for v in kept), _weight(skip, entry.value))
    where = (places.anchor_slot, places.tail_id, places.anchor_length, places.length, places.num_tokens)
    y, store, *tail_after = call(
        *stores, *numbers, *(v.astype(jnp.int32) for v in (*where, places.write_slot)),
        interval=np.int64(places.interval),
    )  # fmt: skip
    return y.astype(entry.value.dtype), store, type(tail)(*tail_after)


def _weight(skip, value):
    return jnp.zeros(value.shape[2], F32) if skip is None else skip.astype(F32)
