"""The delta update in C++, for CPU: each state is read and written once a step, in one order for any number of rows."""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.fixed_order import exp, rounded

F32 = jnp.float32


def delta_update(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """See `api.delta_update`; the store must be float32."""
    decay = exp(rounded(log_decay.reshape(*v.shape[:3], -1).astype(F32)))
    results = jax.ShapeDtypeStruct(v.shape, F32), jax.ShapeDtypeStruct(store.shape, F32)
    call = jax.ffi.ffi_call(native.target("delta_update"), results, input_output_aliases={5: 1})
    numbers = (one.astype(F32) for one in (q, k, v, decay, beta))
    y, store = call(*numbers, store, read_slot.astype(jnp.int32), write_slot.astype(jnp.int32))
    return y.astype(v.dtype), store
