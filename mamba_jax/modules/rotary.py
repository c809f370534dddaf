"""Rotary position embeddings (Su et al., "RoFormer", 2021)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels_pallas.fixed_order import rounded
from mamba_jax.config import RopeConfig
from mamba_jax.modules.basic import scaled


def rotations(positions: Int[Array, " T"], rope: RopeConfig) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosine and sine of each position's angles, in float32."""
    # Constants, rounded once: a power in float32 would be off by more, times the position.
    powers = rope.theta ** (-np.arange(0, rope.size, 2) / rope.size)
    frequency = np.array(rope.frequencies) if rope.frequencies else powers
    angle = rounded(positions.astype(jnp.float32)[:, None] * frequency.astype(np.float32))
    return scaled(jnp.cos(angle), rope.scale), scaled(jnp.sin(angle), rope.scale)


def rotate(
    x: Float[Array, "T heads head_dim"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads head_dim"]:
    """Rotates the pair of elements i and i + half, for each i below half. Elements after them stay as they are."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., start : start + half].astype(jnp.float32) for start in (0, half))
    turned = [
        rounded(first * cos) - rounded(second * sin),
        rounded(second * cos) + rounded(first * sin),
    ]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], axis=-1)
