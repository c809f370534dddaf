"""Quantized weights among a model's parameters."""

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from flax import nnx
from jaxtyping import Array

from kernels_pallas.quantized import PARTS, Quantized
from kernels_pallas.quantized import bits_of as bits_of


class QuantizedParam(nnx.Module):
    """Replaces an `nnx.Param`, for example `out_proj.weight`, and is read in the same way.

    Its arrays are separate parameters (`out_proj.weight.values`, `out_proj.weight.channel_scale`), so code that handles
    parameters, such as loading, sharding and saving, gets plain arrays.
    """

    values: nnx.Param

    def __init__(self, weight: Quantized) -> None:
        for part in PARTS:
            value = getattr(weight, part)
            setattr(self, part, None if value is None else nnx.Param(value))

    def __getitem__(self, key: EllipsisType) -> Quantized:
        found = {part: getattr(self, part) for part in PARTS}
        return Quantized(**{part: None if param is None else param[...] for part, param in found.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own."""
        return self.values.shape


def weight_of(path: str) -> str | None:
    """Returns the dotted path of the weight that a parameter is a part of, if it is part of a quantized one."""
    weight, _, part = path.rpartition(".")
    return weight if part in PARTS else None


def quantized_weights(values: Mapping[str, Any]) -> dict[str, Quantized]:
    """Returns the quantized weights among parameters, by dotted path.

    Raises:
        ValueError: parts do not match, or have no values.
    """
    found: dict[str, dict[str, Array]] = {}
    for path, value in values.items():
        if (weight := weight_of(path)) is not None:
            found.setdefault(weight, {})[path.rpartition(".")[2]] = value
    for path, parts in found.items():
        if "values" not in parts:
            raise ValueError(f"{path}.{next(iter(parts))} belongs to no quantized weight")
        Quantized(**parts).check(path)
    return {path: Quantized(**parts) for path, parts in found.items()}


def can_be_quantized(model: nnx.Module, path: str) -> bool:
    """Returns whether the parameter with this dotted path is a weight that may be quantized."""
    owner, name = _owner(model, path)
    return name in getattr(owner, "quantizable", ())


def quantize_in_place(model: nnx.Module, weights: Mapping[str, Quantized]) -> None:
    """Puts quantized weights where a model has dense ones.

    Raises:
        ValueError: the model has no weight of that name and shape that may be quantized.
    """
    for path, weight in weights.items():
        owner, name = _owner(model, path)
        dense = getattr(owner, name, None)
        if dense is None or not can_be_quantized(model, path):
            raise ValueError(f"{path} cannot be quantized")
        if dense.shape != weight.shape:
            raise ValueError(f"{path} has shape {weight.shape}, expected {dense.shape}")
        setattr(owner, name, QuantizedParam(weight))


def _owner(model: nnx.Module, path: str) -> tuple[Any, str]:
    """Returns the module that a parameter belongs to, and its name there."""
    *where, name = path.split(".")
    owner: Any = model
    for step in where:
        owner = owner[int(step)] if step.isdigit() else getattr(owner, step, None)
    return owner, name
