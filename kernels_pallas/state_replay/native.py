"""The replay in C++, for CPU: each anchor is read once for all new tokens (`native/*.cc`)."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import native

F32 = jnp.float32
_KNOWN = (F32, jnp.bfloat16)


def unsupported(states, tail, x, dt, a, b, c, d, **places):
    """Returns why it cannot run this call, or None."""
    if states.dtype not in _KNOWN:
        return f"states are {states.dtype}, not float32 or bfloat16"
    if tail.x.dtype not in _KNOWN or tail.b.dtype != tail.x.dtype or tail.dt.dtype != F32:
        return f"tails are {tail.x.dtype}, {tail.b.dtype} and {tail.dt.dtype}, not all float32, or bfloat16 but for dt"
    return native.why_missing("state_replay")


def state_replay(states, tail, x, dt, a, b, c, d, *, interval, **places):
    """See `api.state_replay`."""
    stores = states, *tail
    results = [jax.ShapeDtypeStruct(x.shape, F32), *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in stores)]
    call = jax.ffi.ffi_call(
        native.target("state_replay"), results, input_output_aliases={i: 1 + i for i in range(len(stores))}
    )
    # Entries keep the tail's precision, so that a token counts alike in its own step and in later ones.
    fed = x.astype(tail.x.dtype), dt, a, b.astype(tail.b.dtype), c, d
    names = ("anchor_slot", "tail_id", "anchor_length", "length", "num_tokens", "write_slot")
    y, states, *new = call(
        *stores, *(v.astype(F32) for v in fed), *(places[name].astype(jnp.int32) for name in names),
        interval=np.int64(interval),
    )  # fmt: skip
    return y.astype(x.dtype), states, type(tail)(*new)
