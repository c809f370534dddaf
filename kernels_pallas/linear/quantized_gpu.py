"""The dense product of few rows with a weight whose scales are of groups, by the GPU kernel of the grouped product.

XLA widens such a weight in memory: 4.5 bytes are moved for a weight of 4 bits. For a prompt's tokens this is little of
the product's time, and the kernel, which widens a weight for each block of tokens, is not used.
"""

import jax.numpy as jnp

from kernels_pallas.grouped_matmul import quantized_gpu as grouped

FEWEST_OUTPUTS = 4096
"""64 blocks. With 32, the kernel takes longer than XLA by its instructions
(docs/compiler-measurements.md); an H200 runs 132."""


def unsupported(x, weight, *, out_dtype):
    if not weight.of_groups:
        return "XLA fuses the widening of values without groups"
    if weight.values.dtype == grouped.FP4:
        return "widening 4-bit floats takes the kernel as long as XLA"
    if weight.shape[0] < FEWEST_OUTPUTS:
        return f"{weight.shape[0]} outputs are fewer than {FEWEST_OUTPUTS} and occupy too few multiprocessors"
    if x.dtype != out_dtype:
        return f"its result is {x.dtype}, not {jnp.dtype(out_dtype)}"
    if len(x) > grouped.MOST_TOKENS:
        return f"{len(x)} rows are more than a block of {grouped.MOST_TOKENS}"
    return grouped.unsupported(x, weight.alone(), None)


def linear(x, weight, *, out_dtype, interpret=None):
    """See `api.linear`. `interpret` are parameters of JAX's interpreter of Mosaic GPU (JAX 0.12)."""
    return grouped.grouped_matmul(x, weight.alone(), jnp.full(1, len(x), jnp.int32), interpret)
