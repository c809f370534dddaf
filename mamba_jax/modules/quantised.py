"""Quantised weights among a model's parameters."""

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from flax import nnx
from jaxtyping import Array

from kernels_pallas.quantised import PARTS, Quantised
from kernels_pallas.quantised import bits_of as bits_of


class QuantisedParam(nnx.Module):
    """Replaces an `nnx.Param`, for example `out_proj.weight`, and is read in the same way.

    Its arrays are separate parameters (`out_proj.weight.values`, `out_proj.weight.channel_scale`), so code that handles
    parameters, such as loading, sharding and saving, gets plain arrays.
    """

    values: nnx.Param

    def __init__(self, weight: Quantised) -> None:
        for part in PARTS:
            value = getattr(weight, part)
            setattr(self, part, None if value is None else nnx.Param(value))

    def __getitem__(self, key: EllipsisType) -> Quantised:
        found = {part: getattr(self, part) for part in PARTS}
        return Quantised(**{part: None if param is None else param[...] for part, param in found.items()})

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own."""
        return self.values.shape


def weight_of(path: str) -> str | None:
    """Returns the dotted path of the weight that a parameter is a part of, if it is part of a quantised one."""
    weight, _, part = path.rpartition(".")
    return weight if part in PARTS else None


def quantised_weights(values: Mapping[str, Any]) -> dict[str, Quantised]:
    """Returns the quantised weights among parameters, by dotted path.

    Raises:
        ValueError: parts do not match, or have no values.
    """
    found: dict[str, dict[str, Array]] = {}
    for path, value in values.items():
        if (weight := weight_of(path)) is not None:
            found.setdefault(weight, {})[path.rpartition(".")[2]] = value
    for path, parts in found.items():
        if "values" not in parts:
            raise ValueError(f"{path}.{next(iter(parts))} belongs to no quantised weight")
        Quantised(**parts).check(path)
    return {path: Quantised(**parts) for path, parts in found.items()}


def can_be_quantised(model: nnx.Module, path: str) -> bool:
    """Returns whether the parameter with this dotted path is a weight that may be quantised."""
    owner, name = _owner(model, path)
    return name in getattr(owner, "quantisable", ())


def quantise_in_place(model: nnx.Module, weights: Mapping[str, Quantised]) -> None:
    """Puts quantised weights where a model has dense ones.

    Raises:
        ValueError: the model has no weight of that name and shape that may be quantised.
    """
    for path, weight in weights.items():
        owner, name = _owner(model, path)
        dense = getattr(owner, name, None)
        if dense is None or not can_be_quantised(model, path):
            raise ValueError(f"{path} cannot be quantised")
        if dense.shape != weight.shape:
            raise ValueError(f"{path} has shape {weight.shape}, expected {dense.shape}")
        setattr(owner, name, QuantisedParam(weight))


def _owner(model: nnx.Module, path: str) -> tuple[Any, str]:
    """Returns the module that a parameter belongs to, and its name there."""
    *where, name = path.split(".")
    owner: Any = model
    for step in where:
        owner = owner[int(step)] if step.isdigit() else getattr(owner, step, None)
    return owner, name
