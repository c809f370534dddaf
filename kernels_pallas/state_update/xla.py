"""The state update in plain JAX."""

import jax.numpy as jnp

from kernels_pallas.slots import read_slots, write_slots

F32 = jnp.float32


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `api.state_update`."""
    rows, steps, heads, head_dim = x.shape
    groups, y_dtype = b.shape[2], x.dtype
    split = (rows, groups, heads // groups, head_dim, store.shape[-1])
    real = (dt != 0).any(axis=2)[..., None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    dt, a, d = (v.astype(F32) for v in (dt, a, d))
    state = read_slots(store, read_slot).astype(F32)
    ys, states = [], []
    for t in range(steps):
        fed = (dt[:, t, :, None] * x[:, t]).reshape(*split[:4], 1) * b[:, t, :, None, None, :]
        state = state * jnp.exp(dt[:, t] * a)[:, :, None, None] + fed.reshape(state.shape)
        states.append(state.astype(store.dtype))
        state = states[-1].astype(F32)
        read = (state.reshape(split) * c[:, t, :, None, None, :]).sum(-1)
        ys.append(read.reshape(rows, heads, head_dim) + d[:, None] * x[:, t])
    out = jnp.stack(ys, axis=1)
    for t in range(steps):
        store = write_slots(store, states[t], write_slot[:, t])
    return out.astype(y_dtype), store
