"""How a store keeps the model's logical arrays; what travels is always logical, so both sides may differ in this.

Divided over devices, a convolution window's channels lie as [B | C] of each device one after the other, and a head of
keys and values may be there several times. Cutting such an array by bytes would hand out the wrong channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Shaped


@dataclass(frozen=True)
class Arrangement:
    """`Arrangement()` is that of one device: the logical arrays themselves."""

    shards: int = 1
    """Devices that share each layer."""
    groups: bool = False
    """B and C are divided by groups; otherwise every device has all of them."""
    kv_repeat: int = 1
    """Devices that keep the same head of keys and values."""

    def bc_out(self, window: Shaped[Array, "*n bc"]) -> Shaped[Array, "*n bc"]:
        """Convolution inputs of B and C as the store has them -> all of B, then all of C."""
        if self.shards == 1 or not self.groups:
            return window
        lead = window.shape[:-1]
        return jnp.swapaxes(window.reshape(*lead, self.shards, 2, -1), -3, -2).reshape(window.shape)

    def bc_in(self, window: Shaped[Array, "*n bc"]) -> Shaped[Array, "*n bc"]:
        """The inverse of `bc_out`."""
        if self.shards == 1 or not self.groups:
            return window
        lead = window.shape[:-1]
        return jnp.swapaxes(window.reshape(*lead, 2, self.shards, -1), -3, -2).reshape(window.shape)

    def kv_out(self, kv: Shaped[Array, "*n stored head_dim"]) -> Shaped[Array, "*n kv2 head_dim"]:
        """Keys (even) and values (odd) of all stored heads -> each logical head once."""
        if self.kv_repeat == 1:
            return kv
        lead, size = kv.shape[:-2], kv.shape[-1]
        by_head = kv.reshape(*lead, -1, self.kv_repeat, 2, size)
        return by_head[..., 0, :, :].reshape(*lead, -1, size)

    def kv_in(self, kv: Shaped[Array, "*n kv2 head_dim"]) -> Shaped[Array, "*n stored head_dim"]:
        """The inverse of `kv_out`."""
        if self.kv_repeat == 1:
            return kv
        lead, size = kv.shape[:-2], kv.shape[-1]
        by_head = jnp.repeat(kv.reshape(*lead, -1, 1, 2, size), self.kv_repeat, axis=-3)
        return by_head.reshape(*lead, -1, size)
