"""A `HybridConfig` as JSON, for checkpoints of our own."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from mamba_jax.config import HybridConfig


def config_to_json(config: HybridConfig) -> dict[str, Any]:
    """Nested dictionaries of plain values; infinity stays a float (Python's json reads and writes it)."""
    return dataclasses.asdict(config)


def config_from_json(fields: Mapping[str, Any]) -> HybridConfig:
    """The inverse of `config_to_json`.

    Raises:
        ValueError: a field is unknown, missing, or not allowed.
    """
    return _build(HybridConfig, fields)


def _build(kind: Any, fields: Any) -> Any:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{kind.__name__}: expected an object, found {fields!r}")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(fields) - set(hints)):
        raise ValueError(f"{kind.__name__}: unknown fields {', '.join(unknown)}")
    try:
        return kind(**{name: _value(hints[name], value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


def _value(hint: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)  # the only sequences in a config are tuples of plain values
    nested = [part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)]
    return _build(nested[0], value) if nested and value is not None else value
