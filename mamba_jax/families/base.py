"""The definition of a family, and the location of its parameters in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mamba_jax.config import HybridConfig


@dataclass(frozen=True)
class HFSource:
    """The location of one of our parameters in a Hugging Face checkpoint.

    Read each of `names`; check that it has the stored shape (see `stored`); take `rows` of it; stack them along new
    first axes if `stack`; reshape to the parameter's shape. Rows are contiguous in memory, so without `stack` (and with
    one piece) nothing needs to be copied. The dtype is the parameter's (`HybridModel.abstract`), not the file's.
    """

    names: tuple[str, ...]
    """Tensors in the file. Exactly one unless `stack` or `cuts`."""
    rows: tuple[int, int] | None = None
    """Half-open range of the tensor's first axis; None = all of it."""
    stored_shape: tuple[int, ...] | None = None
    """Each tensor's shape in the file. None = the parameter's own (without its first axis, if `stack`)."""
    stack: bool = False
    """Each tensor is one entry of the parameter's first axis (the experts of a layer), or of its first two; or
    there are fewer tensors, which follow each other along the first axis."""
    alternatives: tuple[HFSource, ...] = ()
    """Other spellings, tried in order when a name is absent."""
    default: float | None = None
    """Value of the parameter's elements if the file has none of the names; None: their absence is an error."""
    pieces: int = 1
    """The tensor's first axis consists of this many equal pieces; `rows` applies to each piece."""

    cuts: tuple[int, ...] = ()
    """`names` are one tensor cut along its first axis: rows of each, as its makers publish it. A file may cut it
    elsewhere, as only the sum counts; `stored_shape` and `rows` are the whole tensor's."""

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that each of `names` must have in the file, for a parameter of this shape."""
        if self.stored_shape is not None:
            return self.stored_shape
        return tuple(shape[1:]) if self.stack else tuple(shape)

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each of `names` as their makers publish them, for a parameter of this shape."""
        stored = self.stored(shape)
        if self.cuts:
            return {name: (rows, *stored[1:]) for name, rows in zip(self.names, self.cuts, strict=True)}
        return dict.fromkeys(self.names, stored)

    def find(self, available: Container[str]) -> HFSource | None:
        """This source or the first alternative whose names are all available; None if there is none."""
        for source in (self, *self.alternatives):
            if all(name in available for name in source.names):
                return source
        return None


@dataclass(frozen=True)
class Family:
    """A model family: everything that is specific to it. One file each in this folder."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    config_from_hf: Callable[[Mapping[str, Any]], HybridConfig]
    """Reads config.json. Raises `ModelConfigError` for wrong or unsupported values."""
    weight_names: Callable[[HybridConfig], dict[str, HFSource]]
    """Our dotted parameter paths (as in `mamba_jax.model.parameters`) and where each is found."""
    ignored: Callable[[HybridConfig], tuple[str, ...]] = lambda config: ()
    """Regular expressions (full match) of tensors that a checkpoint may have and this model does not use, apart from
    those that no family uses (`families.ignored`)."""


def tensor(
    name: str, *others: str, rows: tuple[int, int] | None = None, shape: tuple[int, ...] | None = None, pieces: int = 1
) -> HFSource:
    """Returns a parameter that is one tensor, or rows of it; `others` are other spellings of the name."""
    first, *rest = (HFSource((each,), rows, shape, pieces=pieces) for each in (name, *others))
    return replace(first, alternatives=tuple(rest))


def with_prefix(sources: Mapping[str, HFSource], *prefixes: str) -> dict[str, HFSource]:
    """Puts the first prefix before every tensor name, and lists the same names with the others as alternatives."""

    def put(source: HFSource, prefix: str) -> HFSource:
        return replace(source, names=tuple(prefix + name for name in source.names), alternatives=())

    def all_of(source: HFSource) -> HFSource:
        first, *rest = [put(s, p) for p in prefixes for s in (source, *source.alternatives)]
        return replace(first, alternatives=tuple(rest))

    return {path: all_of(source) for path, source in sources.items()}


def placed(path: str, sources: Mapping[str, HFSource], *prefixes: str) -> dict[str, HFSource]:
    """Puts `path.` before every one of our paths, and each of `prefixes` before the tensors' names."""
    return {f"{path}.{name}": source for name, source in with_prefix(sources, *prefixes).items()}
