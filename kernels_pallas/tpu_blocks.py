"""Shared code of the TPU kernels: blocks of heads that fit registers and VMEM, and products on the matrix unit.

A register has 8 rows of 128 lanes of 32 bits each, or 16 or 32 rows of smaller numbers. A kernel's blocks must consist
of whole registers, unless there is only one block. `block_bytes` is the maximum size of a block's states in VMEM.
"""

import functools

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
        held: the dtype of a block's states in VMEM.
    """
    lanes_of_heads = next(n for n in range(8, 8 * LANES + 1, 8) if n * head_dim % LANES == 0)
    lanes_of_groups = next(n for n in range(1, LANES + 1) if n * state % LANES == 0)
    most = block_bytes // _head_bytes(head_dim, state, held)
    return head_blocks(heads, groups, most=max(1, most), multiple=lanes_of_heads, group_multiple=lanes_of_groups)


def heads_together(head_dim: int, repeats: int) -> int:
    """Returns how many heads of a group (of `repeats`) fill the lanes of a register with their channels."""
    together = LANES // head_dim if LANES % head_dim == 0 else 1
    return together if repeats % together == 0 else 1


def in_large_memory(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Pins the array to HBM, for a kernel that copies parts of it; the compiler must not move all of it to VMEM."""
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def dot(
    left: Shaped[Array, "..."], right: Shaped[Array, "..."], contract: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "..."]:
    """Multiplies operands rounded to `dtype` over these two axes, summed in float32; float32 in full precision."""
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        left.astype(dtype), right.astype(dtype), dims, precision=precision, preferred_element_type=F32
    )


def bfloat16_parts(values: Float[Array, "*shape"], held: DTypeLike, most: int = 3) -> list[Float[Array, "*shape"]]:
    """Splits `values` (float32) into parts that sum to them, so that products on the matrix unit keep their digits.

    Each part is a float32 with the 8 digits of a bfloat16. Three parts have all 24 digits of a float32; with two, up to
    2^-16 of a value is lost (`most`).

    Args:
        held: a dtype that represents the values. Values that fit in bfloat16 are returned as a single part.
    """
    if jnp.finfo(held).nmant <= jnp.finfo(BF16).nmant:
        return [values]
    parts = []
    for _ in range(most - 1):
        # The upper half of a float32 is a bfloat16. Truncated, not rounded: a compiler may remove a conversion to
        # bfloat16 that is followed by a conversion back.
        bits = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(lax.bitcast_convert_type(bits, F32))
        values = values - parts[-1]
    return [*parts, values]


def accurate_dot(left, right, dtype):
    """Multiplies float32 matrices: in full precision for `dtype` float32, else all but the last digits of them."""
    if dtype == F32:
        return dot(left, right, (1, 0), F32)
    (left_high, left_low), (right_high, right_low) = (bfloat16_parts(one, F32, 2) for one in (left, right))
    product = functools.partial(dot, contract=(1, 0), dtype=BF16)
    return product(left_high, right_high) + (product(left_low, right_high) + product(left_high, right_low))


def _head_bytes(head_dim: int, state: int, dtype: DTypeLike) -> int:
    """Returns bytes of a head's state in VMEM, with rows padded to whole registers."""
    return head_dim * -(-state // LANES) * LANES * jnp.dtype(dtype).itemsize
