"""What the Triton kernels share: sizes of blocks, which are powers of two in every dimension, and masked accesses."""

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, ..."""
    return n > 0 and n & (n - 1) == 0


def power_of_two_in(n: int, most: int) -> int:
    """The largest power of two that divides n and is at most `most`."""
    power = 1
    while power * 2 <= most and n % (power * 2) == 0:
        power *= 2
    return power


def offsets_overflow(array) -> bool:
    """Whether an offset into the array may not fit: Triton counts elements in 32 bits, with a sign, up to 4 GiB."""
    return array.size >= 1 << 31 and array.size * array.dtype.itemsize <= 1 << 32


def load_if(condition: Bool[Array, "..."], ref, *shape: int):
    """What `ref` (a reference to a block of `shape`) holds; zeros, and no access, where not `condition`."""
    return plt.load(ref, mask=jnp.broadcast_to(condition, shape), other=jnp.zeros(shape, ref.dtype))


def store_if(condition: Bool[Array, "..."], ref, value: Array) -> None:
    """Writes `value` where `condition`."""
    plt.store(ref, value, mask=jnp.broadcast_to(condition, value.shape))
