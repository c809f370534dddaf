"""Checks that arrays have the shapes and dtypes that annotations say; for jaxtyping's import hook.

Only arrays are looked at, so that a module may annotate the rest as it likes. What stands for an array counts as well:
numpy's, and shapes with dtypes.
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from jaxtyping import AbstractArray

ARRAY = re.compile(r"\bArray\b")


def arrays_checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its array arguments and result checked at each call."""
    if function.__name__ == "__init__":  # of a pytree, which JAX also makes of pieces of its arrays
        return function
    signature = inspect.signature(function)
    parameters = {name: _arrays(p.annotation, function) for name, p in signature.parameters.items()}
    parameters = {name: hints for name, hints in parameters.items() if hints}
    result = _arrays(signature.return_annotation, function)
    if not parameters and not result:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says better what is wrong
        for name, hints in parameters.items():
            if name in given:
                _check(f"{function.__qualname__}: {name}", given[name], hints)
        value = function(*args, **kwargs)
        _check(f"{function.__qualname__}: its result", value, result)
        return value

    return checked


def only_with_arrays(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """`jaxtyping.jaxtyped` for functions whose annotations name an array; all else stays as it is.

    The import hook decorates every function and class. Engines call thousands of these in each step.
    """

    def decorator(**options: Any) -> Callable[[Any], Any]:
        check = jaxtyped(**options)
        return lambda one: check(one) if inspect.isfunction(one) and _names_arrays(one) else one

    return decorator


def _names_arrays(function: Callable[..., Any]) -> bool:
    """Whether an annotation names an array, and each `n-1` has an `n`: of fields of arguments, jaxtyping sees none."""
    text = " ".join(map(str, function.__annotations__.values()))
    symbolic = re.findall(r"\b([a-z_]+)-1\b", text)
    return ARRAY.search(text) is not None and all(re.search(rf"\b{name}\b(?!-)", text) for name in symbolic)


def _arrays(annotation: Any, function: Callable[..., Any]) -> list[Any]:
    """The kinds of array that an annotation allows; none where it is about something else."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(function, "__globals__", {}))
        except Exception:  # a name that is imported for type checkers only
            return []
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    arms = typing.get_args(annotation) if union else (annotation,)
    return [arm for arm in arms if isinstance(arm, type) and issubclass(arm, AbstractArray)]


def _check(where: str, value: Any, hints: list[Any]) -> None:
    if not hints or not (hasattr(value, "shape") and hasattr(value, "dtype")) or not hasattr(value, "ndim"):
        return
    if not any(isinstance(value, hint.dtype[type(value), hint.dim_str]) for hint in hints):
        expected = " or ".join(f"{hint.dtype.__name__}[{hint.dim_str!r}]" for hint in hints)
        raise TypeError(f"{where} is {value.dtype}{list(value.shape)}, expected {expected}")
