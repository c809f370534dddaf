"""The selective update in C++, for CPU: each state is read and written once a step (`native/selective_update.cc`)."""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.fixed_order import rounded

F32 = jnp.float32


def selective_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `api.selective_update`; the store must be float32."""
    dtype, real = x.dtype, (dt != 0).any(axis=2)
    x, dt, b, c = (jnp.where(real[:, :, None], one, 0).astype(F32) for one in (x, dt, b, c))
    results = jax.ShapeDtypeStruct(x.shape, F32), jax.ShapeDtypeStruct(store.shape, F32)
    call = jax.ffi.ffi_call(native.target("selective_update"), results, input_output_aliases={6: 1})
    places = read_slot.astype(jnp.int32), write_slot.astype(jnp.int32)
    y, store = call(dt * x, dt, a.astype(F32), b, c, real.astype(jnp.int32), store, *places)
    return (y + rounded(d.astype(F32) * x)).astype(dtype), store
