"""A quantized weight: narrow values and their scales.

    weight[..., o, i] = (values[..., o, i] - group_zero[..., g, o]) * group_scale[..., g, o] * channel_scale[..., o]

where g = i // (inputs / groups). Formats have some of the three; an absent zero point counts as 0, an absent scale as
1. A scale of a whole tensor is repeated for each output, so that tensors can be cut and stacked by outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Num

PARTS = ("values", "channel_scale", "group_scale", "group_zero", "input_scale")
"""Names of the arrays that a quantized weight consists of."""


def bits_of(dtype: DTypeLike) -> int:
    """What one number takes on a device: two 4-bit ones share a byte there."""
    dtype = jnp.dtype(dtype)
    return 4 if dtype.name in ("int4", "uint4", "float4_e2m1fn") else 8 * dtype.itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized weight, as described above. Shape and axes are those of the weight that it represents.

    The parts are arrays, or placeholders of arrays (tracers, shapes).
    """

    values: Any
    """[*lead, outputs, inputs], of a narrow dtype: int4, int8, float8_e4m3fn, float4_e2m1fn."""
    channel_scale: Any = None
    """[*lead, outputs]."""
    group_scale: Any = None
    """[*lead, groups, outputs]: an accelerator pads the last axis to whole lanes, and groups are few."""
    group_zero: Any = None
    """[*lead, groups, outputs]."""
    input_scale: Any = None
    """[*lead, outputs]: the scale by which inputs may be divided, to be rounded to the weight's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The weight's own."""
        return self.values.ndim

    @property
    def is_int8_by_channel(self) -> bool:
        """Whether values are int8, and have no scale but that of each channel. C++ multiplies these as they are."""
        return self.values.dtype == jnp.int8 and not self.of_groups

    @property
    def of_groups(self) -> list[Any]:
        """Those of scale and zero point [*lead, groups, outputs] that the weight has, in this order."""
        return [part for part in (self.group_scale, self.group_zero) if part is not None]

    @property
    def group(self) -> int:
        """The number of inputs of a group; all without groups."""
        return self.shape[-1] // (self.of_groups[0].shape[-2] if self.of_groups else 1)

    def scaled(self, product: Num[Array, "*batch outputs"]) -> Num[Array, "*batch outputs"]:
        """Returns a product with `widened`, times the scale of each channel; of a matrix."""
        return product if self.channel_scale is None else product * self.channel_scale.astype(jnp.float32)

    def check(self, name: str) -> None:
        """Checks that the shapes of the arrays match.

        Raises:
            ValueError: they do not; the message begins with the name of the part that is wrong.
        """
        *lead, outputs, inputs = self.shape
        for part in ("channel_scale", "input_scale"):
            scale = getattr(self, part)
            if scale is not None and scale.shape != (*lead, outputs):
                raise ValueError(f"{name}.{part} has shape {scale.shape}, expected {(*lead, outputs)}")
        for part in ("group_scale", "group_zero"):
            found = getattr(self, part)
            if found is None:
                continue
            groups = found.shape[-2] if found.ndim == self.ndim else 0
            if not groups or found.shape != (*lead, groups, outputs) or inputs % groups:
                raise ValueError(f"{name}.{part} has shape {found.shape}, which does not fit a weight of {self.shape}")

    def _each(self, values: Any, by_outputs: Any, by_groups: Any) -> Quantized:
        """Returns the weight of these functions of its values, and of its scales by outputs and by groups."""
        of_parts = {"group_scale": by_groups, "group_zero": by_groups}
        scales = {part: getattr(self, part) for part in PARTS[1:]}
        made = {part: of_parts.get(part, by_outputs)(v) for part, v in scales.items() if v is not None}
        return Quantized(values(self.values), **made)

    def matrix(self, lead: int = 0) -> Quantized:
        """Returns the same weight as [*lead, all outputs, inputs], where the first `lead` axes stay as they are."""
        first, outputs = self.shape[:lead], math.prod(self.shape[lead:-1])
        return self._each(
            lambda v: v.reshape(*first, outputs, -1),
            lambda v: v.reshape(*first, outputs),
            lambda v: jnp.moveaxis(v, -2, lead).reshape(*first, -1, outputs),
        )

    def alone(self) -> Quantized:
        """Returns the weight as that of the only expert: with a first axis of 1."""

        def one(part: Any) -> Any:
            is_shape = isinstance(part, jax.ShapeDtypeStruct)
            return jax.ShapeDtypeStruct((1, *part.shape), part.dtype) if is_shape else part[None]

        return jax.tree.map(one, self)

    def take(self, index: Array) -> Quantized:
        """Returns the outputs with these indices, of a matrix; those out of range are clipped."""
        by_outputs, by_groups = (functools.partial(jnp.take, indices=index, axis=n, mode="clip") for n in (0, 1))
        return self._each(by_outputs, by_outputs, by_groups)

    def widened(self, dtype: DTypeLike) -> Num[Array, "*lead outputs inputs"]:
        """Returns the weight without the scale of each channel."""
        if not self.of_groups:
            return jnp.asarray(self.values).astype(dtype)
        exact = jnp.float32
        wide = jnp.asarray(self.values).astype(exact).reshape(*self.shape[:-1], -1, self.group)
        if self.group_zero is not None:
            wide = wide - jnp.swapaxes(self.group_zero.astype(exact), -1, -2)[..., None]
        if self.group_scale is not None:
            wide = wide * jnp.swapaxes(self.group_scale.astype(exact), -1, -2)[..., None]
        return wide.astype(dtype).reshape(self.shape)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Num[Array, "*lead outputs inputs"]:
        """Returns the whole weight."""
        wide = self.widened(jnp.float32)
        if self.channel_scale is not None:
            wide = wide * self.channel_scale.astype(jnp.float32)[..., None]
        return wide.astype(dtype)
