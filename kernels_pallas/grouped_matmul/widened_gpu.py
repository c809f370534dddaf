"""The grouped product with weights in few bits on GPU: JAX's kernel for wide weights, on those of one call, widened.

For calls that `quantised_gpu.py` does not support.

The kernel takes no narrow weights, and XLA's own grouped product is a dense one with all experts there
(`pallas_gpu.py`): it masks a copy of the tokens for each expert. By the GPU compiler's count that was 64 GB for a
prefill of 2,048 tokens by Nemotron-3-Super on two devices, where this takes 2.1. Widening costs what it does: a decode
step writes and reads the experts wide.
"""

import jax
from jax import lax

from kernels_pallas.grouped_matmul import pallas_gpu, quantised


def unsupported(x, w, group_sizes):
    """Returns why this call cannot run, or None."""
    return pallas_gpu.unsupported(x, jax.ShapeDtypeStruct(w.shape, x.dtype), group_sizes)


def grouped_matmul(x, w, group_sizes):
    """See `api.grouped_matmul`."""
    # Tied to the tokens: nothing else keeps the compiler from widening many layers' experts before the first are used.
    x, w = lax.optimization_barrier((x, w))
    product = pallas_gpu.grouped_matmul(x, w.widened(x.dtype), group_sizes)
    return quantised.by_channel(x, w, group_sizes, product)
