"""Makes JSON of what models write: objects with errors, while they arrive, and values as text or Python literals.

Without a grammar, a model may write `NaN`, invalid escapes, superfluous commas, or omit commas. Clients parse a call's
arguments as JSON, so one such error would make the whole answer unusable.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from serving.api.http.json_values import MAX_DEPTH, parse_written

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+|\s")
_BARE = re.compile(r'[^\s{}\[\]",:<]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGINS = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_PAIR_BEGINS = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
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


class WrittenObject:
    """Reads an object in pieces and returns it as valid JSON. Reads each character once.

    Valid JSON is unchanged. Values that JSON does not have become strings, missing values and values nested more than
    `MAX_DEPTH` levels deep become null, missing separators are added, and superfluous ones are removed.

    Args:
        closing: the mark after the calls; it ends the object anywhere except in strings.
    """

    def __init__(self, closing: str = "") -> None:
        self._closing = closing
        self._open: list[str] = []
        """Closing brackets of the open arrays and objects."""
        self._arrays = 0
        """Number of open arrays."""
        self._expects = "value"
        """The expected next element: key, colon, value or comma."""
        self._comma = ""
        """A comma and the space after it, held back until another item follows."""
        self._bare = ""
        """The current number or word, until it ends."""
        self._in_string = False
        self._out: list[str] = []
        self.broken = False
        """The closing mark of the calls occurred within the object."""

    def push(self, text: str, at: int = 0) -> tuple[int, str, bool]:
        """Reads `text` from `at`. Returns the position after the text read, its valid JSON, and whether the object
        ends.

        The caller passes the remaining text again, followed by new text.
        """
        complete = False
        while at < len(text) and not complete:
            before = at
            if self._in_string:
                at = self._string(text, at)
            else:
                at, complete = self._structure(text, at)
            if at == before and not complete:
                break
        written, self._out = "".join(self._out), []
        return at, written, complete

    def _string(self, text: str, at: int) -> int:
        if (plain := _PLAIN.match(text, at)) is not None:
            self._write(plain[0])
            return plain.end()
        if text[at] == '"':
            self._write('"')
            self._in_string = False
            self._expects = "colon" if self._expects == "key" else "comma"
            return at + 1
        if text[at] != "\\":
            self._write(json.dumps(text[at])[1:-1])
            return at + 1
        if _ESCAPE_BEGINS.match(text, at) or _PAIR_BEGINS.match(text, at):
            return at
        if (escape := _PAIR.match(text, at) or _ESCAPE.match(text, at)) is None:
            self._write("\\\\")
            return at + 1
        alone = len(escape[0]) == 6 and _SURROGATE.match(escape[0])
        self._write("\\ufffd" if alone else escape[0])
        return escape.end()

    def _structure(self, text: str, at: int) -> tuple[int, bool]:
        letter = text[at]
        if letter == "<":  # JSON contains it only in strings
            seen = text[at : at + len(self._closing)] if self._closing else ""
            if seen and seen == self._closing:
                self.broken = True
                self._close("}", all_levels=True)
                return at, True
            if seen and self._closing.startswith(seen):
                return at, False
            self._bare += letter
            return at + 1, False
        if (bare := _BARE.match(text, at)) is not None:
            self._bare += bare[0]
            return bare.end(), False
        self._end_bare()
        if (space := _SPACE.match(text, at)) is not None:
            shown = " " if space[0].strip(" \t\r\n") else space[0]
            if self._comma:
                self._comma += shown
            else:
                self._write(shown)
            return space.end(), False
        if letter == '"':
            self._begin_item(may_be_key=True)
            self._write('"')
            self._in_string = True
        elif letter in "{[":
            self._begin_item(may_be_key=False)
            if len(self._open) == MAX_DEPTH:
                self._write("null")
            self._open.append("}" if letter == "{" else "]")
            self._arrays += letter == "["
            self._write(letter)
            self._expects = self._item()
        elif letter == ":":
            if self._expects == "colon":
                self._write(":")
                self._expects = "value"
        elif letter == ",":
            self._complete_member()
            if self._expects == "comma":
                self._comma, self._expects = ",", self._item()
        elif letter == "}" or self._arrays:
            self._close(letter)
        return at + 1, not self._open

    def _item(self) -> str:
        """Returns the first element of an item in the innermost array or object: key or value."""
        return "key" if self._open[-1] == "}" else "value"

    def _begin_item(self, *, may_be_key: bool) -> None:
        """Writes the missing separators and keys before a string or a value."""
        if self._expects == "comma":
            self._write(", ")
            self._expects = self._item()
        elif self._expects == "colon":
            self._write(": ")
            self._expects = "value"
        self._write(self._comma)
        self._comma = ""
        if self._expects == "key" and not may_be_key:
            self._write('"": ')
            self._expects = "value"

    def _complete_member(self) -> None:
        """Writes null for a key without a value."""
        if self._expects == "colon":
            self._write(": null")
            self._expects = "comma"
        elif self._expects == "value" and self._item() == "key":
            self._write(" null")
            self._expects = "comma"

    def _close(self, bracket: str, *, all_levels: bool = False) -> None:
        """Closes the innermost array or object with this bracket, and everything in it."""
        self._end_bare()
        closed = ""
        while self._open and (all_levels or closed != bracket):
            self._complete_member()
            self._comma = ""
            closed = self._open[-1]
            self._write(closed)
            self._open.pop()
            self._arrays -= closed == "]"
            self._expects = "comma"

    def _end_bare(self) -> None:
        word, self._bare = self._bare, ""
        if not word:
            return
        self._begin_item(may_be_key=True)
        if self._expects == "key":
            self._write(json.dumps(word, ensure_ascii=False))
            self._expects = "colon"
            return
        try:
            parse_written(word)
        except ValueError:
            word = _PYTHON_NAMES.get(word) or json.dumps(word, ensure_ascii=False)
        self._write(word)
        self._expects = "comma"

    def _write(self, text: str) -> None:
        if len(self._open) <= MAX_DEPTH:
            self._out.append(text)


def read_object(text: str) -> object:
    """Returns the value of a JSON object written by a model.

    Raises:
        ValueError: the text is not an object, or is incomplete.
    """
    begin = len(text) - len(text.lstrip())
    if not text.startswith("{", begin):
        raise ValueError("not an object")
    _, valid, complete = WrittenObject().push(text, begin)
    if not complete:
        raise ValueError("the object does not end")
    return json.loads(valid)


def schema_types(schema: Any) -> frozenset[str]:
    """Returns the types in a JSON schema; empty if it has none."""
    names = schema.get("type") if isinstance(schema, Mapping) else None
    names = [names] if isinstance(names, str) else names
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def read_untyped(text: str, schema: Any) -> Any:
    """Returns the value of `text`, which is a string or JSON according to the parameter's schema.

    If the schema admits only strings, the value is a string. If it admits no strings, Python's spelling (`True`,
    `None`) is also accepted. Text that cannot be parsed is a string.
    """
    types = schema_types(schema)
    if types == {"string"}:
        return text
    try:
        value = parse_literal(text) if types and "string" not in types else parse_written(text)
    except ValueError:
        return text
    admitted = any(_is(value, name) for name in types)
    return text if "string" in types and not admitted else value


def read_literal(text: str, schema: Any) -> Any:
    """Returns the value of a Python literal that is not a plain string. Other text is a string. A number is a string
    if the schema admits only strings."""
    text = text.strip()
    try:
        value = parse_literal(text)
    except ValueError:
        return text
    return text if schema_types(schema) == {"string"} and isinstance(value, (int, float)) else value


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
