"""The state update in C++, for CPU: each state is read and written once, all its steps in between (`native/*.cc`)."""

import jax
import jax.numpy as jnp

from kernels_pallas import native

F32 = jnp.float32


def unsupported(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Returns why it cannot run this call, or None."""
    if store.dtype not in (F32, jnp.bfloat16):
        return f"states are {store.dtype}, not float32 or bfloat16"
    return native.WHY_MISSING


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `api.state_update`."""
    results = jax.ShapeDtypeStruct(x.shape, F32), jax.ShapeDtypeStruct(store.shape, store.dtype)
    call = jax.ffi.ffi_call(native.target("state_update"), results, input_output_aliases={6: 1})
    numbers = (v.astype(F32) for v in (x, dt, a, b, c, d))
    y, store = call(*numbers, store, read_slot.astype(jnp.int32), write_slot.astype(jnp.int32))
    return y.astype(x.dtype), store
