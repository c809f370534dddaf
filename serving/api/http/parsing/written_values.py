"""Makes JSON of values that models write as text or as Python literals, by the types that a tool's schema admits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.api.http.json_values import parse_written
from serving.api.http.parsing.written_json import WrittenObject

_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict,
    "string": str,
}  # fmt: skip


def schema_types(schema: Any, root: Any = None, *, most: int = 1000) -> frozenset[str]:
    """Returns the types of the values that a JSON schema admits, as far as it names them; empty if it names none.

    Args:
        schema: the schema, whose alternatives and references count too.
        root: the schema that references refer to.
        most: maximum number of alternatives and references that are read.
    """
    found, waiting, seen = set[str](), [schema], set[int]()
    while waiting and len(seen) < most:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        names = part.get("type")
        names = [names] if isinstance(names, str) else names
        values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
        if isinstance(names, list):
            found.update(name for name in names if isinstance(name, str))
        elif values:
            found.update(name for name in _TYPES for value in values if _is(value, name))
        else:
            for word in ("anyOf", "oneOf", "allOf"):
                alternatives = part.get(word)
                waiting += alternatives if isinstance(alternatives, list) else ()
            reference = part.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/"):
                target = root
                for key in reference[2:].split("/"):
                    target = target.get(key) if isinstance(target, Mapping) else None
                waiting.append(target)
    return frozenset(found)


class WrittenText:
    """Makes JSON of a value that is written as text without quotes.

    It returns strings as they arrive, and other values when they are complete.

    Args:
        types: the types that the schema admits.
        padding: text before the value.
    """

    def __init__(self, types: frozenset[str], padding: str = "") -> None:
        self._types, self._padding = types, padding
        self._parts: list[str] = []
        self._begun = False

    def push(self, text: str) -> str:
        """Reads new text. Returns new JSON."""
        if self._begun:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._parts.append(text)
        if "string" not in self._types or not self._types <= {"string", "null"}:
            return ""
        value = self._value()
        if not value or ("null" in self._types and "null".startswith(value)):
            return ""
        self._begun = True
        return json.dumps(value, ensure_ascii=False)[:-1]

    def end(self) -> str:
        """Returns the rest of the JSON."""
        return '"' if self._begun else json.dumps(read_untyped(self._value(), self._types), ensure_ascii=False)

    def _value(self) -> str:
        return "".join(self._parts).removeprefix(self._padding)


def read_untyped(text: str, types: frozenset[str]) -> Any:
    """Returns the value of `text`, which is a string or JSON according to the types that its schema admits.

    If the schema admits only strings, the value is a string. If it admits no strings, Python's spelling (`True`,
    `None`) is also accepted. Text that cannot be parsed is a string.
    """
    if types == {"string"}:
        return text
    try:
        value = parse_literal(text) if types and "string" not in types else parse_written(text)
    except ValueError:
        return text
    admitted = any(_is(value, name) for name in types)
    return text if "string" in types and not admitted else value


def read_literal(text: str, types: frozenset[str]) -> Any:
    """Returns the value of a Python literal that is not a plain string. Other text is a string. A number is a string
    if the schema admits strings and no numbers."""
    text = text.strip()
    try:
        value = parse_literal(text)
    except ValueError:
        return text
    number = isinstance(value, (int, float)) and "string" in types
    return text if number and not any(_is(value, name) for name in types) else value


def parse_literal(text: str) -> Any:
    """Returns the value of a Python or JSON literal: `None` and `null`, `True` and `true`, lists, tuples, dictionaries.

    Raises:
        ValueError: the text is not one literal, or a key has no colon.
    """
    written = WrittenObject(python=True)
    read, valid, complete = written.push(f"[{text}]")
    values = json.loads(valid) if complete and written.keyed and read == len(text) + 2 else []
    if len(values) != 1:
        raise ValueError("not a literal")
    return values[0]


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES.get(name, ())) and not (isinstance(value, bool) and name in ("integer", "number"))
