"""What the TPU kernels share: blocks of heads as registers and VMEM want them, and products on the matrix unit.

A register has 8 rows of 128 lanes of 32 bits each, or 16 or 32 rows of smaller numbers. A kernel's blocks must be
whole numbers of them, unless there is one block only. `block_bytes` is what the states of a block may take of VMEM.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from kernels_pallas.heads import HeadBlocks, head_blocks

BF16, F32 = jnp.bfloat16, jnp.float32
LANES = 128


def blocks_in_rows(
    inputs: Shaped[Array, "rows steps heads head_dim"],
    groups: int,
    store: Shaped[Array, "slots heads head_dim state"],
    *,
    together: int = 1,
    block_bytes: int,
) -> HeadBlocks:
    """Blocks for inputs and outputs with a head, or some heads `together`, in each row of a register."""
    rows_of_register = 32 // min(inputs.dtype.itemsize, 4)
    most = block_bytes // _head_bytes(store.shape[2], store.shape[3], store.dtype)
    return head_blocks(inputs.shape[2], groups, most=max(1, most), multiple=rows_of_register * together)


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


def heads_together(head_dim: int, repeats: int) -> int:
    """How many heads of a group (of `repeats`) fill the lanes of a register with their channels."""
    together = LANES // head_dim if LANES % head_dim == 0 else 1
    return together if repeats % together == 0 else 1


def in_large_memory(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The array, for a kernel that copies parts of it itself: the compiler must not bring all of it onto the chip."""
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def dot(
    left: Shaped[Array, "..."], right: Shaped[Array, "..."], contract: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "..."]:
    """A product over these two axes, summed in float32, of operands rounded to `dtype`; float32 in full precision."""
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        left.astype(dtype), right.astype(dtype), dims, precision=precision, preferred_element_type=F32
    )


def bfloat16_parts(values: Float[Array, "*shape"], held: DTypeLike, most: int = 3) -> list[Float[Array, "*shape"]]:
    """What the matrix unit takes for `values` (float32) so that products keep their digits: numbers that sum to them.

    Each has the 8 digits of a bfloat16, but is a float32 still. Three have all 24 of a float32; with two at `most`,
    2^-16 of a value may be lost.

    Args:
        held: the dtype that the values had, or fit in. What fits in a bfloat16 is its own only part.
    """
    if jnp.finfo(held).nmant <= jnp.finfo(BF16).nmant:
        return [values]
    parts = []
    for _ in range(most - 1):
        # The upper half of a float32 is a bfloat16. It is cut, not rounded: a rounding that is taken back right away
        # is one that a compiler may leave out.
        bits = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(lax.bitcast_convert_type(bits, F32))
        values = values - parts[-1]
    return [*parts, values]


def _head_bytes(head_dim: int, state: int, dtype: DTypeLike) -> int:
    """Of a head's state as it lies in VMEM: rows are padded to whole registers."""
    return head_dim * -(-state // LANES) * LANES * jnp.dtype(dtype).itemsize
