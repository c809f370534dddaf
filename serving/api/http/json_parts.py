"""Long responses as JSON, part by part, so that neither the event loop nor memory has to hold them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

_PART = 8
"""Items of a list that are made and encoded at once. An item has at most 150 log-probabilities, so that takes a
millisecond or two."""
_LONG = 256
"""Lists with more items are encoded in parts."""
_SENT = 1 << 16
"""Bytes that are sent at once, at least."""


class ListInParts:
    """A long list of a response. Its items are made when it is sent, a few at a time.

    Args:
        length: number of items.
        part: returns the items from one place up to another.
    """

    def __init__(self, length: int, part: Callable[[int, int], list[Any]]) -> None:
        self._length, self._part = length, part

    def parts(self) -> Iterator[list[Any]]:
        """Yields the items."""
        for begin in range(0, self._length, _PART):
            yield self._part(begin, min(begin + _PART, self._length))


def listed(length: int, part: Callable[[int, int], list[Any]]) -> Any:
    """Returns a list for a field of a response: as it is if it is short, otherwise a `ListInParts`."""
    return part(0, length) if length <= _LONG else ListInParts(length, part)


def is_long(value: Any) -> bool:
    """Returns whether a response, or a part of one, should be encoded in parts."""
    match value:
        case ListInParts():
            return True
        case BaseModel():
            return any(map(is_long, vars(value).values()))
        case [BaseModel(), *_]:
            return len(value) > _LONG or any(map(is_long, value))
    return False


def json_parts(value: Any, *, exclude_unset: bool) -> Iterator[bytes]:
    """Yields the JSON text of a response. Making each part takes a bounded time: about `_PART` items of a list."""
    match value:
        case ListInParts():
            yield from _joined(b"[]", ([to_json(items)[1:-1]] for items in value.parts()))
        case [BaseModel(), *_]:
            yield from _joined(b"[]", (json_parts(item, exclude_unset=exclude_unset) for item in value))
        case BaseModel() if is_long(value):
            names = value.model_fields_set if exclude_unset else type(value).model_fields
            yield from _joined(b"{}", (_field(name, getattr(value, name), exclude_unset) for name in names))
        case BaseModel():
            yield value.model_dump_json(exclude_unset=exclude_unset, by_alias=True).encode()
        case _:
            yield to_json(value)


def _field(name: str, value: Any, exclude_unset: bool) -> Iterator[bytes]:
    yield to_json(name) + b":"
    yield from json_parts(value, exclude_unset=exclude_unset)


def _joined(brackets: bytes, items: Iterator[Any]) -> Iterator[bytes]:
    yield brackets[:1]
    for place, item in enumerate(items):
        if place:
            yield b","
        yield from item
    yield brackets[1:]


def next_bytes(parts: Iterator[bytes]) -> bytes:
    """Returns the next parts together, as many as are sent at once; empty at the end."""
    found = bytearray()
    for part in parts:
        found += part
        if len(found) >= _SENT:
            break
    return bytes(found)
