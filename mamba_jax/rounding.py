"""Recurrent states in fewer bits: the stored form of waiting states, and the rounding of running rows to match it.

int8 has a scale for each head and channel (all axes but the last): the largest number becomes 127. A scale is a
bfloat16, so 127 times it is exact in float32, and what was rounded once comes out of a second rounding as it went in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num, Shaped

_FLOATS = {"bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of exponent and mantissa."""
_MOST = 127
_SCALE = "_scale"


@dataclass(frozen=True)
class NarrowDtype:
    """A dtype for states that wait: bfloat16, float16, or int8 with scales."""

    dtype: str

    def parts(self, name: str, state: Float[Array, "*lead n"]) -> dict[str, Shaped[Array, ...]]:
        """Returns the arrays that a state called `name` is kept as: itself, and with int8 its scales [*lead]."""
        if self.dtype in _FLOATS:
            return {name: self.rounded(state).astype(self.dtype)}
        values, scale = _scaled(state)
        return {name: values.astype(jnp.int8), name + _SCALE: scale.astype(jnp.bfloat16)}

    def widened(self, name: str, parts: Mapping[str, Array]) -> Float[Array, "*lead n"]:
        """Returns the inverse of `parts`, in float32."""
        state = parts[name].astype(jnp.float32)
        return state if self.dtype in _FLOATS else state * parts[name + _SCALE].astype(jnp.float32)[..., None]

    def rounded(self, state: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
        """What comes back of a state that has waited, in its own dtype. Finite numbers stay finite."""
        if self.dtype in _FLOATS:
            most = float(jnp.finfo(self.dtype).max)
            in_range = jnp.where(jnp.isfinite(state), jnp.clip(state, -most, most), state)
            # Not by two conversions, which the compiler may remove. Subnormal numbers become 0.
            return lax.reduce_precision(in_range, *_FLOATS[self.dtype])
        values, scale = _scaled(state)
        return (values * scale[..., None]).astype(state.dtype)

    def names(self, name: str) -> tuple[str, ...]:
        """The members of `parts`."""
        return (name,) if self.dtype in _FLOATS else (name, name + _SCALE)

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a state of this shape."""
        count = math.prod(shape)
        return 2 * count if self.dtype in _FLOATS else count + 2 * (count // shape[-1])


@dataclass(frozen=True)
class RoundedRows:
    """Running rows round their states at every multiple of this number of tokens, where a checkpoint can be taken."""

    narrow: NarrowDtype
    every: int
    names: tuple[str, ...]
    """The arrays of a slot that are rounded."""


def _scaled(state: Float[Array, "*lead n"]) -> tuple[Num[Array, "*lead n"], Float[Array, "*lead"]]:
    """Returns whole numbers and their scales, both as float32. Numbers that are not finite give scales that are not."""
    wide = state.astype(jnp.float32)
    scale = lax.reduce_precision(jnp.abs(wide).max(axis=-1) / _MOST, *_FLOATS["bfloat16"])
    over = jnp.where(scale > 0, scale, 1.0)[..., None]
    return jnp.clip(jnp.round(wide / over), -_MOST, _MOST), scale
