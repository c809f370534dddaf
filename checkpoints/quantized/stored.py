"""A quantized weight as it is stored: its parts, which are read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import ml_dtypes
import numpy as np

from checkpoints.tensors.tensor_set import TensorSet

BF16 = np.dtype(ml_dtypes.bfloat16)
FP4 = np.dtype(ml_dtypes.float4_e2m1fn)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)
INT4 = np.dtype(ml_dtypes.int4)
INT8 = np.dtype(np.int8)
INPUT_SCALE = "input_scale"
"""The part that describes the rounding of inputs. It is not a part of the weight."""
PRE_QUANT_SCALE = "pre_quant_scale"
"""Factors of inputs, of ModelOpt's AWQ and SmoothQuant."""


class InvalidTensor(Exception):
    """A tensor is missing or does not match its format; the message names it."""


class Tensors(Protocol):
    """Tensors by name: those of files, with or without quantized ones, or arrays in memory."""

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its stored shape."""

    def view(self, name: str) -> np.ndarray:
        """Its values."""

    def release(self, name: str) -> None:
        """Releases a tensor after the last use of its values."""


@dataclass(frozen=True)
class Part:
    """One array of a quantized weight; see `kernels_pallas.quantized`."""

    dtype: np.dtype
    read: Callable[[], np.ndarray] = field(compare=False)
    """channel_scale [*lead, outputs], of groups [*lead, groups, outputs], values [*lead, outputs, inputs]."""
    groups: int = 0


@dataclass(frozen=True)
class StoredWeight:
    """The stored form of one weight. Weights with equal `form` can be stacked."""

    label: str
    """A short description of the format."""
    shape: tuple[int, ...]
    parts: dict[str, Part]
    uses: tuple[str, ...]
    """Names of all tensors that belong to it."""
    narrow: bool = True
    """Whether the weight can stay quantized; otherwise it is dequantized when it is read."""

    @property
    def form(self) -> tuple[str, tuple[tuple[str, Part], ...], bool]:
        """The properties that must be equal among weights that become one parameter."""
        own = {name: part for name, part in self.parts.items() if name != INPUT_SCALE}
        return self.label, tuple(sorted(own.items())), self.narrow

    def wide(self) -> np.ndarray:
        """Returns the weight in float32."""
        read = {name: part.read().astype(np.float32) for name, part in self.parts.items()}
        values, groups = read["values"], max((part.groups for part in self.parts.values()), default=0)
        if groups:
            split = values.reshape(*values.shape[:-1], groups, -1)
            if "group_zero" in read:
                split = split - np.swapaxes(read["group_zero"], -1, -2)[..., None]
            if "group_scale" in read:
                split = split * np.swapaxes(read["group_scale"], -1, -2)[..., None]
            values = split.reshape(values.shape)
        values = values * read["channel_scale"][..., None] if "channel_scale" in read else values
        return values * read[PRE_QUANT_SCALE] if PRE_QUANT_SCALE in read else values


Shapes = Callable[[], Mapping[str, tuple[int, ...]]]


class Module:
    """The tensors of one quantized module: `NAME.weight` and its companions. Records which were used."""

    def __init__(self, tensors: TensorSet, name: str, *, fused: bool = False, wide: Shapes = dict) -> None:
        """`fused`: the weight is the tensor `NAME`, of all experts, with companions such as `NAME_scale_inv`.
        `wide`: returns the shapes of the model's weights by name, as far as they are known."""
        self.tensors, self.name, self._fused, self.wide = tensors, name, fused, wide
        self.uses: list[str] = []

    def _named(self, suffix: str) -> str:
        if not self._fused:
            return f"{self.name}.{suffix}"
        if suffix == "weight":
            return self.name
        names = (f"{self.name}_{suffix}", f"{self.name}_{suffix.removeprefix('weight_')}")
        return next((name for name in names if name in self.tensors.names), names[0])

    def has(self, suffix: str) -> bool:
        """Returns whether there is such a tensor."""
        return self._named(suffix) in self.tensors.names

    def dtype(self, suffix: str) -> str:
        """Returns a tensor's dtype as the file spells it."""
        return self.tensors.dtype(self._full(suffix))

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Returns the shape of a required tensor."""
        return self.tensors.shape(self._full(suffix))

    def view(self, suffix: str) -> np.ndarray:
        """Returns the values of a tensor."""
        return self.tensors.view(self._named(suffix))

    def expect(self, suffix: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Checks a required tensor.

        Raises:
            InvalidTensor: it is missing, or has another shape or dtype.
        """
        found = self.shape(suffix)
        if found != shape:
            raise InvalidTensor(f"{self.name}.{suffix} is {list(found)}, expected {list(shape)}")
        if dtypes and self.dtype(suffix) not in dtypes:
            raise InvalidTensor(f"{self.name}.{suffix} is {self.dtype(suffix)}, expected {' or '.join(dtypes)}")

    def allow(self, *suffixes: str) -> None:
        """Allows tensors that may be present but are not used."""
        self.uses += [self._named(suffix) for suffix in suffixes if self.has(suffix)]

    def weight(
        self, label: str, shape: tuple[int, ...], parts: dict[str, Part], *, narrow: bool = True
    ) -> StoredWeight:
        """Returns the weight that consists of these parts, and of all tensors that were used.

        A factor for each input (`pre_quant_scale`) is for inputs before they are rounded. Here it becomes a factor of
        the weight, which is widened then.
        """
        if self.has(PRE_QUANT_SCALE):
            self.expect(PRE_QUANT_SCALE, shape[-1:])
            parts = {**parts, PRE_QUANT_SCALE: Part(F32, lambda: self.view(PRE_QUANT_SCALE))}
            label, narrow = f"{label}, inputs with factors (widened)", False
        return StoredWeight(label, shape, parts, tuple(self.uses), narrow)

    def _full(self, suffix: str) -> str:
        full = self._named(suffix)
        if full not in self.tensors.names:
            raise InvalidTensor(f"{full} is missing")
        if full not in self.uses:
            self.uses.append(full)
        return full

    def scale_of_channels(self, suffix: str, shape: tuple[int, ...], *, inverse: bool = False) -> Part:
        """Returns a scale of the whole tensor, or one of each channel, as one of each channel in float32."""
        *lead, outputs, _ = shape
        channels = (*lead, outputs)
        found = self.shape(suffix)
        each = found in (channels, (*channels, 1))
        of_each_expert = len(lead) == 1 and found in ((*lead,), (*lead, 1), (*lead, 1, 1))
        if not each and math.prod(found) != 1 and not of_each_expert:
            raise InvalidTensor(f"{self.name}.{suffix} is {list(found)}, expected one number or {list(channels)}")

        def read() -> np.ndarray:
            scale: np.ndarray = self.view(suffix).astype(np.float32)
            if inverse:
                scale = np.reciprocal(scale)
            if each:
                return scale.reshape(channels)
            return np.broadcast_to(scale.reshape(-1, 1) if scale.size > 1 else scale.reshape(-1), channels)

        return Part(F32, read)

    def input_scale(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """Returns the part that describes the rounding of inputs, if any."""
        if not self.has(INPUT_SCALE):
            return {}
        return {INPUT_SCALE: self.scale_of_channels(INPUT_SCALE, shape)}

    def scale_of_groups(self, suffix: str, shape: tuple[int, ...], groups: int, dtype: np.dtype) -> Part:
        """Returns a scale [*lead, outputs, groups] of each group of inputs."""
        *lead, outputs, _ = shape
        self.expect(suffix, (*lead, outputs, groups))
        return Part(dtype, lambda: np.swapaxes(self.view(suffix), -1, -2), groups)
