"""Makes JSON of values that models write as text or as Python literals, by the types that a tool's schema admits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from serving.api.http.json_values import parse_written

_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict,
    "string": str,
}  # fmt: skip
_WORDS = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}
_BRACKETS = {"(": "[", ")": "]"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<mark>[\[\](){},:])|(?P<word>[^\s\[\](){},:"']+))""",
    re.DOTALL,
)
_HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(
    rf"\\(?:u(?P<high>[dD][89abAB]{_HEX}{{2}})\\u(?P<low>[dD][c-fC-F]{_HEX}{{2}})|u(?P<u>{_HEX}{{4}})|x(?P<x>{_HEX}{{2}})"
    rf"|U(?P<U>{_HEX}{{8}})|(?P<octal>[0-7]{{1,3}})|(?P<other>.))",
    re.DOTALL,
)
"""An escape in a Python string; a surrogate pair counts as one escape."""
ESCAPE_PART = re.compile(
    rf"\\(?:x{_HEX}?|U{_HEX}{{0,7}}|[0-7]{{1,2}}|u{_HEX}{{0,3}}|u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u{_HEX}{{0,3}})?)?)?"
)
"""Text that may become an escape or a longer escape."""
_LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\\": "\\", '"': '"',
    "'": "'", "/": "/",
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
        ValueError: the text is not a literal, has no JSON equivalent, or is nested too deeply.
    """
    written: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError("not a literal")
        at = token.end()
        if token["text"] is not None:
            written.append(json.dumps(ESCAPE.sub(unescaped, token["text"][1:-1])))
        elif token["mark"] is None:
            written.append(_word(token["word"]))
        else:
            if token["mark"] in ")]}" and written[-1:] == [","]:
                written.pop()
            written.append(_BRACKETS.get(token["mark"], token["mark"]))
    return parse_written(" ".join(written))


def unescaped(escape: re.Match[str]) -> str:
    """Returns the text that an escape represents; the escape itself if it is invalid."""
    if escape["high"] is not None:
        pair = f"{escape['high']}{escape['low']}"
        return bytes.fromhex(pair).decode("utf-16-be")
    if escape["octal"] is not None:
        return chr(int(escape["octal"], 8))
    if escape["other"] is not None:
        return _LETTERS.get(escape["other"], escape[0])
    number = int(escape["u"] or escape["x"] or escape["U"], 16)
    if 0xD800 <= number <= 0xDFFF:  # half a surrogate pair
        return "\N{REPLACEMENT CHARACTER}"
    return chr(number) if number <= 0x10FFFF else escape[0]


def _word(word: str) -> str:
    """Returns a constant or a number as JSON."""
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.dumps(int(word))
    except ValueError:
        number = float(word)  # also raises ValueError
        if not math.isfinite(number):
            raise ValueError(f"{word} is not JSON") from None
        return json.dumps(number)


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES.get(name, ())) and not (isinstance(value, bool) and name in ("integer", "number"))
