"""The selective scan in C++, for CPU (`native/selective_update.cc`): token by token, states are read and written once.

Schedule-invariant programs use it: the order of the sums is the same for any number of rows and tokens.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.fixed_order import F32, rounded
from kernels_pallas.places import rows_of_tiles
from kernels_pallas.row_loop import sequences_in_slots


def selective_scan(entry, store, tiles, *, a, d):
    """See `api.selective_scan`; the store must be float32."""
    return selective_update(entry, store, rows_of_tiles(tiles, entry.real), a=a, d=d)


def selective_scan_sequence(entry, *, a, d, initial_state):
    store, rows = sequences_in_slots(entry.x.shape[1], initial_state.astype(F32))
    y, store = selective_update(entry, store, rows, a=a, d=d)
    return y, store[1:]


def selective_update(entry, store, rows, *, a, d):
    """See `api.selective_update`; the store must be float32. A negative slot to read: the state of the row before."""
    x, b, c, dt = entry.masked()
    results = jax.ShapeDtypeStruct(x.shape, F32), jax.ShapeDtypeStruct(store.shape, F32)
    call = jax.ffi.ffi_call(native.target("selective_update"), results, input_output_aliases={6: 1})
    places = (v.astype(jnp.int32) for v in (rows.read_slot, rows.write_slot))
    y, store = call(dt * x, dt, a.astype(F32), b, c, entry.real.astype(jnp.int32), store, *places)
    return (y + rounded(d.astype(F32) * x)).astype(entry.x.dtype), store
