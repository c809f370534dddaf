"""Calls that are written as JSON: `{"name": ..., "arguments": {...}}`, one or a list of them."""

from __future__ import annotations

import json
import re
from typing import Any

from serving.api.http.call_pieces import CallPiece, Numbering, skip_to
from serving.api.http.json_values import parse_written
from serving.api.http.written_object import WrittenObject, read_object

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEAD = 2048
_BETWEEN = " \t\r\n,[]"


class JsonCalls:
    """The parser.

    The arguments come out as they are written, as valid JSON, once the name is known. An object that does not begin
    with its name and then its arguments comes out when it is complete.
    """

    def __init__(self, closing: str, numbering: Numbering) -> None:
        self._closing, self._numbering = closing, numbering
        self._text = ""
        """From the beginning of what has not been read for good."""
        self._seen = 0
        """How much of it `_object` has read."""
        self._object: WrittenObject | None = None
        """The object that is being read."""
        self._valid = ""
        """What it has returned, while the name is not known."""
        self._in_arguments = self._after_arguments = False
        self.began = self.over = False
        self.rest = ""

    def push(self, text: str, *, last: bool) -> list[CallPiece]:
        """As `CallParser.push`."""
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
        """Before an object, or after one."""
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
        """Within an object whose name is not known yet."""
        assert self._object is not None
        found = _HEAD.match(self._text) if self._seen <= _LONGEST_HEAD else None
        if found is not None and found.end() <= _LONGEST_HEAD:
            self._text = self._text[found.end() :]
            self._object, self._seen = WrittenObject(self._closing), 0
            self._in_arguments = self.began = True
            return [self._numbering.begin(_name(found[1]))]
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
    """A JSON string's value; what stands between its quotes where it has a wrong escape."""
    try:
        return str(parse_written(text))
    except ValueError:
        return text[1:-1]


def _read(text: str) -> tuple[str, dict[str, Any]] | None:
    """A call's name and arguments, in any order and under any of the usual names; None for what is none."""
    try:
        call = parse_written(text)
    except ValueError:
        return None
    name, arguments = call.get("name"), object_of(call.get("arguments", call.get("parameters", {})))
    return (name, arguments) if isinstance(name, str) and arguments is not None else None


def object_of(value: Any) -> dict[str, Any] | None:
    """Arguments as an object; some models write the object's JSON text as a string. None where the value is neither."""
    if isinstance(value, str):
        try:
            value = read_object(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None
