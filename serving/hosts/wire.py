"""A batch as bytes: which one it is, the types and shapes of its arrays as JSON, then the arrays as they lie in memory.

Nothing is executed to read one: classes, fields and types come from the short lists below, and every length is checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from mamba_jax.batch import DecodeBatch, MixedBatch, PageTableBatch, PrefillBatch, SeatBatch
from mamba_jax.programs import Batch
from mamba_jax.sampling.masks import MaskBatch
from mamba_jax.sampling.table import SamplingTable

_BATCHES: tuple[type, ...] = (DecodeBatch, PrefillBatch, MixedBatch, SeatBatch, MaskBatch, PageTableBatch)
_CLASSES: dict[str, type] = {each.__name__: each for each in (*_BATCHES, SamplingTable)}
_DTYPES = {np.dtype(name).str: np.dtype(name) for name in ("bool", "int32", "uint32", "float32")}
_MAX_DIMENSIONS = 4
_MAX_HEADER = 1 << 16


class WireError(ValueError):
    """Malformed batch."""


def to_bytes(number: int, batch: Batch) -> list[bytes | memoryview]:
    """A call with its place in the order of all calls, in pieces that need not be copied together."""
    arrays: list[np.ndarray] = []
    header = json.dumps([number, _described(batch, arrays)], separators=(",", ":")).encode()
    return [len(header).to_bytes(4, "big"), header, *(array.reshape(-1).view(np.uint8).data for array in arrays)]


def from_bytes(message: bytes) -> tuple[int, Batch]:
    """Decode a message of `to_bytes`.

    Raises:
        WireError: it is malformed.
    """
    size = int.from_bytes(message[:4], "big")
    if not 0 < size <= min(_MAX_HEADER, len(message) - 4):
        raise WireError("no header")
    try:
        number, described = json.loads(message[4 : 4 + size])
        rest = _Rest(message, 4 + size)
        batch = _value(described, rest)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"not a batch: {error}") from None
    if type(number) is not int or not isinstance(batch, _BATCHES):
        raise WireError("not a batch")
    if rest.at != len(message):
        raise WireError(f"{len(message) - rest.at} extra bytes")
    return number, batch  # type: ignore[return-value]


class _Rest:
    """The arrays' bytes, taken one after the other."""

    def __init__(self, message: bytes, at: int) -> None:
        self._message, self.at = message, at

    def take(self, kind: np.dtype, shape: tuple[int, ...]) -> Any:
        size = kind.itemsize * math.prod(shape)
        if size > len(self._message) - self.at:
            raise WireError("truncated")
        found = np.frombuffer(self._message, kind, count=math.prod(shape), offset=self.at).reshape(shape)
        self.at += size
        # A program for numbers is not the one for arrays without dimensions.
        return found[()] if not shape else found


def _described(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or type(value) is int:
        return value
    if dataclasses.is_dataclass(value):
        fields = {field.name: _described(getattr(value, field.name), arrays) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    array = np.ascontiguousarray(value)
    arrays.append(array)
    return [array.dtype.str, *np.shape(value)]


def _value(described: Any, rest: _Rest) -> Any:
    if described is None or type(described) is int:
        return described
    if isinstance(described, dict):
        ((name, fields),) = described.items()
        return _CLASSES[name](**{field: _value(each, rest) for field, each in fields.items()})
    kind, *shape = described
    if len(shape) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise WireError("not a shape")
    return rest.take(_DTYPES[kind], tuple(shape))
