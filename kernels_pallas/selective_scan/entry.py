"""What the selective scan gets of each token, and what it keeps of the tokens since a stored state."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

F32 = jnp.float32


class SelectiveEntry(NamedTuple):
    """Tokens: of rows, tiles or whole sequences, [rows, steps, ...]."""

    x: Float[Array, "rows steps inner"]
    """Any float dtype; so are b and c."""
    b: Float[Array, "rows steps state"]
    c: Float[Array, "rows steps state"]
    dt: Float[Array, "rows steps inner"]
    """Step sizes after softplus, float32. 0 in all channels marks padding, whose other numbers may be anything."""

    @property
    def real(self) -> Bool[Array, "*lead"]:
        """Whether a token is no padding."""
        return (self.dt != 0).any(axis=-1)

    def masked(self) -> SelectiveEntry:
        """Returns the entry in float32, with zeros as padding, which may hold NaN: 0 * NaN is NaN."""
        real = self.real[..., None]
        return SelectiveEntry(*(jnp.where(real, v, 0).astype(F32) for v in self))


class SelectiveTail(NamedTuple):
    """The tails of one layer: rings of inputs. A row's token n is at entry n % L. Tail 0 belongs to no row."""

    x: Float[Array, "tails entries inner"]
    b: Float[Array, "tails entries state"]
    dt: Float[Array, "tails entries inner"]
    """float32, after softplus."""
