"""The dense product with a weight in few bits, in plain JAX.

XLA fuses the widening of values into the product on TPU and GPU, if nothing but a conversion lies between them: the
scale of a channel is therefore applied to the result.
"""

import jax.numpy as jnp
from jax import lax


def linear(x, weight, *, out_dtype):
    """See `api.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    product = lax.dot_general(
        rows, weight.widened(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if weight.channel_scale is not None:
        product = product * weight.channel_scale.astype(jnp.float32)
    return product.astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])
