"""The selective scan in C++, for CPU (`native/selective_update.cc`): token by token, states are read and written once.

Schedule-invariant programs use it: the order of the sums is the same for any number of rows and tokens.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.fixed_order import rounded
from kernels_pallas.places import rows_of_sequences, rows_of_tiles

F32 = jnp.float32


def selective_scan(x, dt, a, b, c, d, store, tiles):
    """See `api.selective_scan`; the store must be float32."""
    rows = rows_of_tiles(tiles, (dt != 0).any(axis=2))
    return selective_update(x, dt, a, b, c, d, store, rows)


def selective_scan_sequence(x, dt, a, b, c, d, *, initial_state=None):
    """See `api.selective_scan_sequence`."""
    start = jnp.zeros((x.shape[0], *a.shape), F32) if initial_state is None else initial_state.astype(F32)
    store = jnp.concatenate([jnp.zeros_like(start[:1]), start])
    y, store = selective_update(x, dt, a, b, c, d, store, rows_of_sequences(*x.shape[:2]))
    return y, store[1:]


def selective_update(x, dt, a, b, c, d, store, rows):
    """See `api.selective_update`; the store must be float32. A negative slot to read: the state of the row before."""
    dtype, real = x.dtype, (dt != 0).any(axis=2)
    x, dt, b, c = (jnp.where(real[:, :, None], one, 0).astype(F32) for one in (x, dt, b, c))
    results = jax.ShapeDtypeStruct(x.shape, F32), jax.ShapeDtypeStruct(store.shape, F32)
    call = jax.ffi.ffi_call(native.target("selective_update"), results, input_output_aliases={6: 1})
    places = rows.read_slot.astype(jnp.int32), rows.write_slot.astype(jnp.int32)
    y, store = call(dt * x, dt, a.astype(F32), b, c, real.astype(jnp.int32), store, *places)
    return (y + rounded(d.astype(F32) * x)).astype(dtype), store
