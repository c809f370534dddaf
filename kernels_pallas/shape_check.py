"""Checks the shapes of an operation's arguments by the names of dimensions in its annotations."""

import dataclasses
import functools
import inspect
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jaxtyping import AbstractArray

_P = ParamSpec("_P")
_R = TypeVar("_R")

DIMENSIONS = tomllib.loads(Path(__file__).with_name("dimensions.toml").read_text(encoding="utf-8"))
"""The legend of their names."""


def shapes_checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function, raising ValueError where its array arguments do not fit its annotations, or one another.

    Names of dimensions are those of `DIMENSIONS`. An argument that is None is left out. Where an annotation allows
    several arrays, it is the one with as many dimensions as are given. The fields of arguments that are named tuples or
    dataclasses are checked likewise.

    Raises:
        KeyError: a dimension is not in the legend.
    """
    signature = inspect.signature(function)
    patterns = {}
    for argument, parameter in signature.parameters.items():
        for name, annotation in _fields(argument, parameter.annotation):
            if found := _dimensions(annotation):
                patterns[name] = found
    for dimension in " ".join(pattern for found in patterns.values() for pattern in found).split():
        if (name := dimension.lstrip("*").removesuffix("-1")) not in DIMENSIONS and not name.isdigit():
            raise KeyError(f"{function.__name__}: the dimension {name!r} is not in the legend")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = signature.bind(*args, **kwargs).arguments
        arrays = {
            name: (array, _fitting(array, found))
            for name, found in patterns.items()
            if (array := _argument(given, name)) is not None
        }
        check_shapes(function.__name__, **arrays)
        return function(*args, **kwargs)

    return checked


def _fields(name: str, annotation: Any) -> Iterator[tuple[str, Any]]:
    """An argument's own annotation, and those of its fields, by `argument.field`."""
    yield name, annotation
    for kind in filter(_has_fields, typing.get_args(annotation) or (annotation,)):
        for field, of_field in typing.get_type_hints(kind).items():
            yield from _fields(f"{name}.{field}", of_field)


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def _argument(given: dict[str, Any], path: str) -> Any:
    """The argument, or the field of it; None where it or the argument is None."""
    name, *fields = path.split(".")
    return functools.reduce(lambda value, field: getattr(value, field, None), fields, given.get(name))


def _dimensions(annotation: Any) -> list[str]:
    """Returns the dimensions in an array's annotation, which may be one of several types."""
    kinds = typing.get_args(annotation) or (annotation,)
    return [kind.dim_str for kind in kinds if isinstance(kind, type) and issubclass(kind, AbstractArray)]


def _fitting(array: Any, patterns: list[str]) -> str:
    return next((pattern for pattern in patterns if len(pattern.split()) == len(array.shape)), patterns[0])


def check_shapes(operation: str, **arguments: tuple[Any, str]) -> dict[str, int]:
    """Binds dimension names to sizes over all arguments, each given as (array, "names of its dimensions").

    A dimension may also be written as a number or as `name-1`, of a name bound by an earlier argument; the first as
    `*name`, which stands for any number of dimensions.

    Returns:
        The size of every name.
    Raises:
        ValueError: an argument has another rank, or a dimension differs from what another argument says.
    """
    sizes: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for argument, (array, pattern) in arguments.items():
        names, shape = pattern.split(), tuple(array.shape)
        given: list[Any] = list(shape)
        if names[:1] and names[0].startswith("*"):
            lead = max(len(shape) - len(names) + 1, 0)
            given = [shape[:lead], *shape[lead:]]
        if len(names) != len(given):
            raise ValueError(f"{operation}: {argument} has shape {shape}, expected [{', '.join(names)}]")
        for name, size in zip(names, given, strict=True):
            if name.isdigit():
                expected, source = int(name), "always"
            elif name.endswith("-1"):
                expected, source = sizes[name[:-2]] - 1, f"by {origin[name[:-2]]}"
            else:
                expected, source = sizes.setdefault(name, size), f"by {origin.setdefault(name, argument)}"
            if size != expected:
                layout = f"[{', '.join(names)}] with {name} = {expected} ({source})"
                raise ValueError(f"{operation}: {argument} has shape {shape}, expected {layout}")
    return {name: size for name, size in sizes.items() if not name.startswith("*")}


def check_groups(operation: str, heads: int, groups: int) -> None:
    """Raises ValueError unless the heads divide evenly into the groups."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{operation}: {heads} heads do not divide into {groups} groups")
