"""What a linear recurrence gets of each token, and what it keeps of the tokens since a stored state."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Entry(NamedTuple):
    """Tokens: of rows, tiles or whole sequences, [rows, steps, ...]. The heads of a group share query and key."""

    query: Float[Array, "rows steps groups state"]
    """Any float dtype; so are key and value."""
    key: Float[Array, "rows steps groups state"]
    value: Float[Array, "rows steps heads head_dim"]
    log_decay: Float[Array, "rows steps heads"] | Float[Array, "rows steps heads state"]
    """At most 0: of each head, or of each channel of its keys. float32."""
    strength: Float[Array, "rows steps heads"]
    """0 in all heads marks padding, whose other numbers may be anything, NaN included. float32."""

    @property
    def by_channel(self) -> bool:
        """Whether every channel of a key decays on its own."""
        return self.log_decay.ndim == 4

    @property
    def decays(self) -> Float[Array, "rows steps heads n"]:
        """The log decays of each head: one, or those of its keys' channels."""
        return self.log_decay if self.by_channel else self.log_decay[..., None]

    @property
    def real(self) -> Bool[Array, "*lead"]:
        """Whether a token is no padding."""
        return (self.strength != 0).any(axis=-1)

    @property
    def repeats(self) -> int:
        """Heads of a group."""
        return self.value.shape[2] // self.key.shape[2]

    def masked(self) -> Entry:
        """Returns the entry with zeros as padding: 0 * NaN is NaN."""
        real = self.real
        return Entry(*(jnp.where(real.reshape(*real.shape, *[1] * (v.ndim - real.ndim)), v, 0) for v in self))


class Tail(NamedTuple):
    """The tails of one layer: rings of what tokens added. A row's token n is at entry n % L. Tail 0 belongs to no row.

    Channels are flat, as a layer has them: with heads and head_dim as axes of their own, a TPU would pad each head to
    128 channels. A token added strength * value (outer) key to the decayed state.
    """

    value: Float[Array, "tails entries inner"]
    """[.., heads * head_dim]: the value, in the precision that the layer computes in. If the recurrence erases, the
    value with what the state held under its key taken off, times the strength: any float dtype, float32 loses nothing.
    """
    key: Float[Array, "tails entries size"]
    """[.., groups * state], in the precision that the layer computes in."""
    log_decay: Float[Array, "tails entries decays"]
    """[.., heads], or [.., heads * state] where channels decay on their own. float32."""
    strength: Float[Array, "tails entries heads"] | None = None
    """float32; None if the recurrence erases."""
