"""What the Triton kernels share: blocks, which are powers of two in every dimension, masked accesses, products."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool

LEAST = 16  # what Triton's products ask of every dimension


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, ..."""
    return n > 0 and n & (n - 1) == 0


def power_of_two_in(n: int, most: int) -> int:
    """The largest power of two that divides n and is at most `most`."""
    power = 1
    while power * 2 <= most and n % (power * 2) == 0:
        power *= 2
    return power


def pieces(size: int) -> list[Any]:
    """An axis cut into equal slices, as few as there can be; where it is no power of two, a block holds one of them."""
    width = power_of_two_in(size, size)
    return [pl.ds(first, width) for first in range(0, size, width)]


def offsets_overflow(array) -> bool:
    """Whether an offset into the array may not fit: Triton counts elements in 32 bits, with a sign, up to 4 GiB."""
    return array.size >= 1 << 31 and array.size * array.dtype.itemsize <= 1 << 32


def load_if(condition: Bool[Array, "..."], ref, *shape: int):
    """What `ref` (a reference to a block of `shape`) holds; zeros, and no access, where not `condition`."""
    return plt.load(ref, mask=jnp.broadcast_to(condition, shape), other=jnp.zeros(shape, ref.dtype))


def store_if(condition: Bool[Array, "..."], ref, value: Array) -> None:
    """Writes `value` where `condition`."""
    plt.store(ref, value, mask=jnp.broadcast_to(condition, value.shape))


def dot(left, right, dtype, *, tensor_cores=False):
    """A product summed in float32, of operands rounded to the dtype; with float32 in full precision.

    With `tensor_cores` float32 goes there, as three products of TF32, which keep all but its last digits, and not to
    units that would need a register for every product. Pallas' interpreter cannot do that.
    """
    precision: Any = lax.Precision.DEFAULT
    if dtype == jnp.float32:
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if tensor_cores else lax.Precision.HIGHEST
    return jnp.dot(
        left.astype(dtype), right.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
