"""Schemas as clients' libraries write them, reduced to what a grammar can enforce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.api.http.protocol.common import OF_GRAMMAR

_UNENFORCED = frozenset({
    OF_GRAMMAR,
    "propertyNames", "uniqueItems", "if", "then", "else", "not", "dependentRequired", "dependentSchemas",
    "dependencies", "contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Words that the grammar library does not know."""
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer",
    "relative-json-pointer",
})  # fmt: skip
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Words whose value is a table of schemas by name."""
_OF_VALUES = ("enum", "const", "default", "examples", "example")
"""Words whose value is no schema."""
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def enforceable(schema: Any, words: set[str] | None = None) -> Any:
    """Returns a schema without the words that a grammar cannot enforce, and adds these words to `words`."""
    if isinstance(schema, list):
        return [enforceable(each, words) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for word, value in schema.items():
        if _known(word, value):
            if word in _OF_NAMES and isinstance(value, Mapping):
                kept[word] = {name: enforceable(each, words) for name, each in value.items()}
            else:
                kept[word] = value if word in _OF_VALUES else enforceable(value, words)
        elif words is not None:
            words.add(word)
    return kept


def _known(word: str, value: Any) -> bool:
    if word == "format" and isinstance(value, str):
        return value in _FORMATS
    if word == "pattern" and isinstance(value, str):
        return not any(mark in value for mark in _LOOK_AROUND)
    return word not in _UNENFORCED
