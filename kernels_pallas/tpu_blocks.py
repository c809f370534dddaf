"""What the TPU kernels share: blocks of heads as registers and VMEM want them, and products.

A register has 8 rows of 128 lanes of 32 bits each, or 16 or 32 rows of smaller numbers. A kernel's blocks must be
whole numbers of them, unless there is one block only. `block_bytes` is what the states of a block may take of VMEM.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from kernels_pallas.heads import HeadBlocks, head_blocks

F32 = jnp.float32
LANES = 128


def blocks_in_rows(
    inputs: Shaped[Array, "rows steps heads head_dim"],
    groups: int,
    store: Shaped[Array, "slots heads head_dim state"],
    *,
    block_bytes: int,
) -> HeadBlocks:
    """Blocks for inputs and outputs with a head in each row of a register."""
    rows_of_register = 32 // min(inputs.dtype.itemsize, 4)
    most = block_bytes // _head_bytes(store.shape[2], store.shape[3], store.dtype)
    return head_blocks(inputs.shape[2], groups, most=max(1, most), multiple=rows_of_register)


def blocks_in_lanes(
    heads: int, groups: int, head_dim: int, state: int, held: DTypeLike, *, block_bytes: int
) -> HeadBlocks:
    """Blocks for inputs and outputs with the channels of all heads, and of all groups, side by side in lanes.

    Args:
        held: the dtype in which a block's states are held.
    """
    lanes_of_heads = next(n for n in range(8, 8 * LANES + 1, 8) if n * head_dim % LANES == 0)
    lanes_of_groups = next(n for n in range(1, LANES + 1) if n * state % LANES == 0)
    most = block_bytes // _head_bytes(head_dim, state, held)
    return head_blocks(heads, groups, most=max(1, most), multiple=lanes_of_heads, group_multiple=lanes_of_groups)


def dot(
    left: Shaped[Array, "..."], right: Shaped[Array, "..."], contract: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "..."]:
    """A product over these two axes, summed in float32, of operands rounded to `dtype`; float32 in full precision."""
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        left.astype(dtype), right.astype(dtype), dims, precision=precision, preferred_element_type=F32
    )


def _head_bytes(head_dim: int, state: int, dtype: DTypeLike) -> int:
    """Of a head's state as it lies in VMEM: rows are padded to whole registers."""
    return head_dim * -(-state // LANES) * LANES * jnp.dtype(dtype).itemsize
