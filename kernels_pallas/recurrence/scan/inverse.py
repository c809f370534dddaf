"""The inverse of a unit lower triangular matrix by products alone."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Dot = Callable[[Array, Array], Array]


def unit_lower_inverse(below: Float[Array, "*batch n n"], dot: Dot) -> Float[Array, "*batch n n"]:
    """(I + below)^-1 for a strictly lower triangular matrix, by doubling the size of inverted diagonal blocks.

    Two neighboring inverses A and B make one of twice the size: its corner is -B M A, where M is what `below` has
    there. Unlike with a power series of the whole matrix, nothing that is computed on the way is larger than the
    inverse itself, and that of the delta rule is bounded (Yang et al., 2024).

    Args:
        dot: the product of two such matrices.
    """
    n = below.shape[-1]
    # Where i and j lie in neighboring blocks of `size`, the highest bit in which they differ is that of `size`.
    differ = lax.broadcasted_iota(jnp.int32, (n, n), 0) ^ lax.broadcasted_iota(jnp.int32, (n, n), 1)
    inverse = jnp.where(differ == 0, 1.0, jnp.where(differ == 1, -below, 0.0))
    size = 2
    while size < n:
        corners = jnp.where((differ >= size) & (differ < 2 * size), below, 0.0)
        inverse = inverse - dot(inverse, dot(corners, inverse))
        size *= 2
    return inverse
