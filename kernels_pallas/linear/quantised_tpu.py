"""The dense product with a weight whose scales are of groups, by the TPU kernel of the grouped product."""

import jax.numpy as jnp

from kernels_pallas.grouped_matmul import quantised_tpu as grouped


def unsupported(x, weight, *, out_dtype):
    """Returns why this call cannot run, or None."""
    if weight.group_scale is None and weight.group_zero is None:
        return "XLA fuses the widening of values without groups"
    rows = x.reshape(-1, x.shape[-1])
    return grouped.unsupported(rows, weight.alone(), jnp.zeros(1, jnp.int32))


def linear(x, weight, *, out_dtype, codes=False, interpret=False):
    """See `api.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    out = grouped.product(rows, weight.alone(), jnp.full(1, rows.shape[0], jnp.int32), codes=codes, interpret=interpret)
    if weight.channel_scale is not None:
        out = out * weight.channel_scale.astype(jnp.float32)
    return out.astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])
