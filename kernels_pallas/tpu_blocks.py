"""Shared code of the TPU kernels: blocks of heads that fit registers and VMEM, and products on the matrix unit.

A register has 8 rows of 128 lanes of 32 bits each, or 16 or 32 rows of smaller numbers. A kernel's blocks must consist
of whole registers, unless there is only one block. A block lies within one group, or is made of whole groups.
`block_bytes` is the maximum size of a block's states in VMEM.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

BF16, F32 = jnp.bfloat16, jnp.float32
LANES = 128


@dataclasses.dataclass(frozen=True)
class HeadBlocks:
    """Blocks of `heads` heads that touch `groups` groups each."""

    count: int
    heads: int
    groups: int
    repeats: int
    """Heads of a group, in the whole operation."""

    def heads_of(self, group: int) -> slice:
        """Returns a block's heads that belong to its group number `group`."""
        size = self.heads // self.groups
        return slice(group * size, (group + 1) * size)

    def first_group(self, block: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the first group of a block, inside of a kernel."""
        if self.heads >= self.repeats:
            return block * self.groups
        return lax.div(block, self.repeats // self.heads)  # `//` would query the TPU of this machine, if any

    def block_of_groups(self, block: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the number of the block of groups, in an index map."""
        return block if self.heads >= self.repeats else self.first_group(block)

    def together(self, head_dim: int) -> Iterator[tuple[int, slice, slice]]:
        """Yields sets of heads of a block that fill the lanes of a register: their group, the heads and their lanes."""
        repeats = self.heads // self.groups
        several = heads_together(head_dim, repeats)
        for first in range(0, self.heads, several):
            last = first + several
            yield first // repeats, slice(first, last), slice(first * head_dim, last * head_dim)


def head_blocks(heads: int, groups: int, *, most: int, multiple: int = 1, group_multiple: int = 1) -> HeadBlocks:
    """Returns the largest blocks of at most `most` heads, or else the smallest blocks that there can be.

    Unless one block has all heads, its heads are a multiple of `multiple`, and its groups of `group_multiple`: what a
    processor's tiling asks for.
    """
    repeats = heads // groups
    fitting = []
    for size in range(1, heads + 1):
        whole = size % repeats == 0
        if heads % size or not (whole or repeats % size == 0):
            continue
        touched = size // repeats if whole else 1
        if size == heads or (size % multiple == 0 and (touched % group_multiple == 0 or touched == groups)):
            fitting.append(HeadBlocks(heads // size, size, touched, repeats))
    small = [blocks for blocks in fitting if blocks.heads <= most]
    return small[-1] if small else fitting[0]


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


def join_heads(parts: Sequence[Array], head_dim: int, axis: int) -> Array:
    """Takes the channels of each head of a set, along an axis, from its part."""
    out = parts[0]
    which = lax.div(lax.broadcasted_iota(jnp.int32, out.shape, axis), head_dim)
    for i in range(1, len(parts)):
        out = jnp.where(which == i, parts[i], out)
    return out


def in_large_memory(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Pins the array to HBM, for a kernel that copies parts of it; the compiler must not move all of it to VMEM."""
    return pltpu.with_memory_space_constraint(array, pltpu.HBM)


def dot(left, right, contract: tuple[int, int], dtype: DTypeLike):
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
