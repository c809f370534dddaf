"""The grouped product on TPU by the kernel that JAX keeps: `jax.experimental.pallas.ops.tpu.megablox`.

It reads only the weights of experts that have tokens, and takes them as checkpoints store them. XLA's own grouped
product (`lax.ragged_dot`) wants them transposed on TPU and copies all of them in every call: 3.9 GB moved instead of
1.3 for a decode step of one layer of Nemotron-3-Nano (128 experts, 384 tokens; the TPU compiler's count).
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from kernels_pallas.grouped_matmul.xla import of_experts
from kernels_pallas.tpu_blocks import LANES

# Tokens, inputs and outputs of a block. The weights' part of it, 1 MiB in 16 bits, is what is moved at a time.
TOKENS, INPUTS, OUTPUTS = 128, 1024, 512


def unsupported(x, w, group_sizes):
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it multiplies {x.dtype} by {w.dtype}"
    return None


def grouped_matmul(x, w, group_sizes, *, interpret=False):
    tokens = x.shape[0]
    size = min(TOKENS, -(-tokens // 16) * 16)
    # The kernel leaves tokens of no expert as it found them; and their gradients, on the way back.
    padded = jnp.pad(of_experts(x, group_sizes), ((0, -tokens % size), (0, 0)))
    tiling = (size, _divisor(w.shape[2], INPUTS), _divisor(w.shape[1], OUTPUTS))
    inputs_first = lies_inputs_first(w.shape)
    out = gmm(
        padded, jnp.swapaxes(w, 1, 2) if inputs_first else w, group_sizes.astype(jnp.int32),
        preferred_element_type=x.dtype, tiling=tiling, transpose_rhs=not inputs_first, interpret=interpret,
    )[:tokens]  # fmt: skip
    return of_experts(out, group_sizes)


def _divisor(size, most):
    """Returns a block of at most `most` that divides a size, or `most` where only narrow ones would."""
    fitting = [n for n in range(LANES, most + 1, LANES) if size % n == 0]
    best = max(fitting, default=0)
    return best if best >= most // 4 else min(most, size)


def lies_inputs_first(shape):
    """Returns whether weights [experts, outputs, inputs] lie in a TPU's memory with their outputs innermost.

    A TPU pads the innermost axis to whole lanes, so its compiler swaps the two where only the outputs fill lanes, as in
    down weights with 1856 inputs. A kernel that wants them otherwise makes XLA copy all experts in every call.
    """
    _, outputs, inputs = shape
    return inputs % LANES != 0 and outputs % LANES == 0
