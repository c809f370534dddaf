"""The grouped product on GPU by the kernel that JAX keeps: `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`.

It is written for Hopper's tensor cores (elsewhere it fails to compile, and `xla` runs), reads only the weights of
experts that have tokens, and takes them as checkpoints store them. XLA's own grouped product (`lax.ragged_dot`) becomes
a dense product with all experts on GPU, over transposed copies of them: 1.55 GB of temporaries for a decode step of one
layer of Nemotron-3-Nano (128 experts, 384 tokens; the GPU compiler's count), where this kernel has none.

It takes no narrow weights: those that `quantized_gpu.py` does not support are widened for it, those of one call at a
time. XLA would mask a copy of the tokens for each expert: by the GPU compiler's count 64 GB for a prefill of 2,048
tokens by Nemotron-3-Super on two devices, where this takes 2.1. Widening costs what it does: a decode step writes and
reads the experts wide.
"""

import importlib.util

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.grouped_matmul import quantized
from kernels_pallas.grouped_matmul.xla import of_experts

INPUTS = 64  # of a block; two of them must be in flight
STAGES = 4
MODULE = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"


def unsupported(x, w, group_sizes):
    if importlib.util.find_spec(MODULE) is None:
        return f"this version of JAX has no {MODULE}"
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies {x.dtype} by {w.dtype}"
    outputs, inputs = w.shape[1:]
    if inputs % INPUTS or inputs < 2 * INPUTS or outputs % 64:
        return f"weights are {outputs} x {inputs}, not multiples of 64"
    return None


def grouped_matmul(x, w, group_sizes):
    # Imported here: the module brings JAX's own test helpers along, which other platforms need not load.
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    tokens, experts = x.shape[0], w.shape[0]
    out = ragged_dot(
        x, w, group_sizes=group_sizes.astype(jnp.int32), block_m=128 if tokens >= 64 * experts else 64,
        block_n=128 if w.shape[1] % 128 == 0 else 64, block_k=INPUTS, max_concurrent_steps=STAGES, grid_block_n=1,
        transpose_rhs=True,
    )  # fmt: skip
    return of_experts(out, group_sizes)


def unsupported_widened(x, w, group_sizes):
    return unsupported(x, jax.ShapeDtypeStruct(w.shape, x.dtype), group_sizes)


def widened(x, w, group_sizes):
    """See `api.grouped_matmul`; w is quantized."""
    # Tied to the tokens: nothing else keeps the compiler from widening many layers' experts before the first are used.
    x, w = lax.optimization_barrier((x, w))
    return quantized.by_channel(x, w, group_sizes, grouped_matmul(x, w.widened(x.dtype), group_sizes))
