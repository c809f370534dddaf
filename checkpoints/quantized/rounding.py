"""Quantization of weights to the nearest value, with each channel or group scaled by its largest magnitude.

Channels are outputs; groups are adjacent inputs of one output.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.placing import Index, Reader, Shardings
from checkpoints.quantized.parameters import Readable, divisible_groups
from checkpoints.quantized.stored import BF16, F32, FP4, FP8, INT4, INT8
from mamba_jax.config import HybridConfig
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel
from mamba_jax.modules.quantized import can_be_quantized

_AT_ONCE = 1 << 24
# Tables and matrices in which a small error affects every token, or every comparison with a token.
_TABLES = ("embed.weight", "lm_head.weight")


class _Kind(NamedTuple):
    """One way to quantize."""

    largest: int
    """The magnitude that the largest of each channel or group becomes."""
    values: np.dtype
    scales: np.dtype = F32
    groups: tuple[int, ...] = ()
    """Numbers of inputs that can share a scale, the best first; empty: all inputs of a channel do."""


_KINDS = {
    "int8": _Kind(127, INT8),
    "fp8": _Kind(448, FP8),
    "int4": _Kind(7, INT4, BF16, (128, 64, 32)),
    "nvfp4": _Kind(6, FP4, FP8, (16,)),
}
QUANTIZATIONS = tuple(_KINDS)


@dataclass(frozen=True)
class Rounding:
    """How one weight is quantized."""

    kind: str
    """One of QUANTIZATIONS."""
    group: int = 0
    """Inputs that share a scale; 0: all inputs of a channel."""

    def parts(self, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the parts of a quantized weight [*lead, outputs, inputs]; see `kernels_pallas.quantized`."""
        *lead, outputs, inputs = shape
        kind = _KINDS[self.kind]
        found = {"values": jax.ShapeDtypeStruct(tuple(shape), kind.values)}
        if self.group:
            found["group_scale"] = jax.ShapeDtypeStruct((*lead, inputs // self.group, outputs), kind.scales)
        if self.kind != "int4":
            found["channel_scale"] = jax.ShapeDtypeStruct((*lead, outputs), F32)
        return found

    def round(self, wide: np.ndarray, largest: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Quantizes a weight, some rows at a time, so that no float32 array of the weight's size is needed.

        `largest` [*lead] is the largest magnitude of the tensors that contain the weight, if not its own.
        """
        *lead, outputs, inputs = wide.shape
        rows = wide.reshape(-1, inputs)
        groups = inputs // self.group if self.group else 1
        parts = self.parts(wide.shape)
        values = np.empty(rows.shape, parts["values"].dtype)
        scale = np.empty((len(rows), groups), F32)
        whole = np.ones(lead, F32)
        if self.kind == "nvfp4":
            whole = _of_tensor(largest_of(wide) if largest is None else largest)
        of_row = np.repeat(whole.reshape(-1), outputs)
        for cut in _cuts(len(rows), inputs):
            split = rows[cut].astype(F32).reshape(-1, groups, inputs // groups)
            scale[cut], rounded = _rounded_groups(self.kind, split, of_row[cut, None])
            values[cut] = rounded.reshape(-1, inputs)
        found = {"values": values.reshape(wide.shape)}
        if "group_scale" in parts:
            by_output = scale.reshape(*wide.shape[:-1], groups)
            found["group_scale"] = np.swapaxes(by_output, -1, -2).astype(parts["group_scale"].dtype)
        if "channel_scale" in parts:
            found["channel_scale"] = (of_row if self.group else scale).reshape(wide.shape[:-1])
        return found


def largest_of(wide: np.ndarray) -> np.ndarray:
    """Returns the largest magnitude of each matrix [*lead, outputs, inputs], as [*lead] in float32."""
    *lead, outputs, inputs = wide.shape
    cuts = _cuts(outputs, inputs)
    found = [
        max((np.abs(matrix[cut].astype(F32)).max() for cut in cuts), default=F32.type(0))
        for matrix in wide.reshape(-1, outputs, inputs)
    ]
    return np.array(found, F32).reshape(lead)


def _cuts(rows: int, inputs: int) -> list[slice]:
    """Divides rows into slices that are processed one at a time."""
    each = max(1, _AT_ONCE // inputs)
    return [slice(start, start + each) for start in range(0, rows, each)]


def _of_tensor(largest: np.ndarray) -> np.ndarray:
    """Returns the tensor's scale, which group scales are divided by to fit e4m3; rounded as the reciprocal in files."""
    whole = largest / np.float32(6 * 448)
    return np.reciprocal(np.reciprocal(np.where(whole > 0, whole, 1).astype(F32)))


def _rounded_groups(kind: str, wide: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales [rows, groups] and values [rows, groups, inputs of one], for the scale `whole` of each row."""
    top, dtype, scales, _ = _KINDS[kind]
    scale = np.abs(wide).max(-1) / np.float32(top)
    scale = np.where(scale > 0, scale, np.float32(1)) / whole
    if kind == "nvfp4":
        scale = np.clip(scale, 2.0**-9, 448)
    scale = scale.astype(scales).astype(F32)
    values = np.clip(wide / (scale * whole)[..., None], -top, top)
    return scale, (np.rint(values).astype(INT8) if kind.startswith("int") else values).astype(dtype)


class Selection:
    """Selects which weights of a model to round, and how.

    Not rounded are the embedding, the head, weights that are not matrices of products (norms, convolutions, routers),
    excluded weights, and matrices whose inputs do not divide into groups.
    """

    def __init__(
        self, config: HybridConfig, sources: Mapping[str, HFSource], quantization: str, exclude: Collection[str] = ()
    ) -> None:
        """
        Args:
            config: of the model.
            sources: names of the parameters in Hugging Face's form, which `exclude` may also use.
            quantization: one of QUANTIZATIONS.
            exclude: names of modules or weights, ours or Hugging Face's, with wildcards.
        Raises:
            CheckpointError: the quantization is unknown, or a name excludes nothing.
        """
        if quantization not in QUANTIZATIONS:
            known = ", ".join(QUANTIZATIONS)
            raise CheckpointError(f"quantization {quantization!r} is not known; allowed are {known}")
        self._kind, self._model = quantization, HybridModel.abstract(config)
        names = {path: {path, *source.names} for path, source in sources.items()}
        self._excluded: set[str] = set()
        for pattern in exclude:
            found = {path for path, own in names.items() if any(_matches(name, pattern) for name in own)}
            if not found:
                raise CheckpointError(f"quantization_exclude: no weight of this model is called {pattern!r}")
            self._excluded |= found

    def of(self, path: str, shape: tuple[int, ...]) -> Rounding | None:
        """Returns how the weight with this dotted path is rounded; None if it stays wide."""
        if path.removeprefix("mtp.") in _TABLES or path in self._excluded or not can_be_quantized(self._model, path):
            return None
        sizes = _KINDS[self._kind].groups
        group = next((size for size in sizes if shape[-1] % size == 0), 0)
        return Rounding(self._kind, group) if group or not sizes else None

    def parameters(
        self, wide: Mapping[str, jax.ShapeDtypeStruct], shardings: Shardings
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns a model's parameters by dotted path, with these weights rounded."""
        found: dict[str, jax.ShapeDtypeStruct] = {}
        for path, target in wide.items():
            rounding = self.of(path, target.shape)
            found |= {path: target} if rounding is None else _targets(path, target.shape, rounding, shardings)
        return found


def rounded(
    path: str,
    target: jax.ShapeDtypeStruct,
    reader: Reader,
    rounding: Rounding,
    shardings: Shardings,
    *,
    largest: Callable[[], np.ndarray] | None = None,
) -> dict[str, Readable]:
    """Returns the parameters of one weight that is read wide and rounded.

    `largest` gives the largest magnitudes (see `largest_of`) of the stored tensor that it is, or is a part of, where it
    is one.
    """
    shape, targets = target.shape, _targets(path, target.shape, rounding, shardings)

    @cache  # rounds when the first part is read
    def parts() -> dict[str, np.ndarray]:
        of_tensor, lead = None, shape[:-2]
        if largest is not None and rounding.kind == "nvfp4":
            found = largest()
            of_tensor = np.broadcast_to(found.reshape((*found.shape, *[1] * (len(lead) - found.ndim))), lead)
        if not lead:
            return rounding.round(reader((slice(None),) * 2), of_tensor)
        # One expert at a time: all experts in float32 would be the largest array in memory.
        stacked = {name: np.empty(part.shape, part.dtype) for name, part in rounding.parts(shape).items()}
        for i in range(shape[0]):
            one = slice(i, i + 1)
            wide = reader((one, *[slice(None)] * (len(shape) - 1)))
            for name, part in rounding.round(wide, None if of_tensor is None else of_tensor[one]).items():
                stacked[name][one] = part
        return stacked

    def read(full: str, index: Index) -> np.ndarray:
        value = parts()[full.rpartition(".")[2]]
        if full.endswith(".group_scale"):
            value = np.repeat(value, targets[full].shape[-2] // value.shape[-2], axis=-2)
        return value[index]

    return {full: (own, partial(read, full)) for full, own in targets.items()}


def _targets(
    path: str, shape: tuple[int, ...], rounding: Rounding, shardings: Shardings
) -> dict[str, jax.ShapeDtypeStruct]:
    """The quantized forms of weights by dotted path. Groups that several devices would share are split."""
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for part, own in rounding.parts(shape).items():
        full = f"{path}.{part}"
        if part == "group_scale":
            *lead, groups, outputs = own.shape
            groups = divisible_groups(full, groups, shape, shardings)
            own = jax.ShapeDtypeStruct((*lead, groups, outputs), own.dtype)
        found[full] = own
    return found


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a pattern names a weight, its module, or a module that it lies in."""
    ends = (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, end) for end in ends)
