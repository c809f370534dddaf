"""Calls in JSON: `{"name": ..., "arguments": {...}}`, or a list of such objects."""

from __future__ import annotations

import json
import re
from typing import Any

from serving.api.http.json_values import parse_written
from serving.api.http.parsing.call_pieces import CallNumbering, CallPiece, skip_to
from serving.api.http.parsing.written_object import WrittenObject, read_object

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEAD = 2048
_BETWEEN = " \t\r\n,[]"


class JsonCalls:
    """Parses these calls.

    If an object starts with its name and then its arguments, the parser returns the arguments as they arrive, as valid
    JSON. Otherwise it returns them when the object is complete.
    """

    def __init__(self, closing: str, numbering: CallNumbering) -> None:
        self._closing, self._numbering = closing, numbering
        self._text = ""
        """Text that has not been consumed."""
        self._seen = 0
        """Length of `_text` that `_object` has read."""
        self._object: WrittenObject | None = None
        """The current object."""
        self._valid = ""
        """Output of `_object` while the name is unknown."""
        self._in_arguments = self._after_arguments = False
        self.began = self.over = False
        self.rest = ""

    def push(self, text: str, *, last: bool) -> list[CallPiece]:
        """Parses new text. See `CallParser.push`."""
        self._text += text
        pieces: list[CallPiece] = []
        while not self.over:
            before = len(self._text), self._seen, self._in_arguments, self._object
            if self._in_arguments:
                pieces += self._arguments()
            elif self._object is not None:
                pieces += self._head()
            else:
                pieces += self._between()
            if before == (len(self._text), self._seen, self._in_arguments, self._object):
                break
        if last and not self.over:
            self._end("")
        return pieces

    def _end(self, rest: str) -> None:
        self.over, self.rest, self._text = True, rest, ""

    def _between(self) -> list[CallPiece]:
        """Reads text before or after an object."""
        after = "} \t\r\n" if self._after_arguments else ""
        self._text = self._text.lstrip(_BETWEEN + after)
        if self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif self._text.startswith("{"):
            self._object, self._seen, self._valid = WrittenObject(self._closing), 0, ""
        elif self._text and not self._closing.startswith(self._text):
            if self.began:  # other fields of an object, after its arguments
                self._text = skip_to(self._text, self._closing, "{")
            else:
                self._end("")
        return []

    def _head(self) -> list[CallPiece]:
        """Reads an object up to the call's name."""
        assert self._object is not None
        matched = _HEAD.match(self._text) if self._seen <= _LONGEST_HEAD else None
        if matched is not None and matched.end() <= _LONGEST_HEAD:
            self._text = self._text[matched.end() :]
            self._object, self._seen = WrittenObject(self._closing), 0
            self._in_arguments = self.began = True
            return [self._numbering.begin(_name(matched[1]))]
        self._seen, valid, complete = self._object.push(self._text, self._seen)
        self._valid += valid
        if not complete:
            return []
        broken = self._object.broken
        self._text, self._object, self._seen = self._text[self._seen :], None, 0
        call = None if broken else _read(self._valid)
        if call is None:
            if not self.began:
                self._end("")
            return []
        self.began = True
        return [self._numbering.begin(call[0]), self._numbering.more(json.dumps(call[1], ensure_ascii=False))]

    def _arguments(self) -> list[CallPiece]:
        assert self._object is not None
        read, shown, complete = self._object.push(self._text)
        self._text = self._text[read:]
        if complete:
            self._in_arguments, self._after_arguments, self._object = False, True, None
        return [self._numbering.more(shown)] if shown else []


def _name(text: str) -> str:
    """Returns the value of a JSON string; its raw content if it has an invalid escape."""
    try:
        return str(parse_written(text))
    except ValueError:
        return text[1:-1]


def _read(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns a call's name and arguments, in any order and under any of the usual names; None if the text is not a
    call."""
    try:
        call = parse_written(text)
    except ValueError:
        return None
    name, arguments = call.get("name"), object_of(call.get("arguments", call.get("parameters", {})))
    return (name, arguments) if isinstance(name, str) and arguments is not None else None


def object_of(value: Any) -> dict[str, Any] | None:
    """Returns arguments as an object; None if that is not possible. Some models write the object as a string with its
    JSON text."""
    if isinstance(value, str):
        try:
            value = read_object(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None
