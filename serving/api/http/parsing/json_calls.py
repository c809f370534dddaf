"""Calls in JSON: `{"name": ..., "arguments": {...}}`, a list of such objects, or arguments after a tag."""

from __future__ import annotations

import json
import re
from typing import Any

from serving.api.http.json_values import parse_written
from serving.api.http.parsing.call_pieces import CallHead, CallNumbering, CallParser, CallPiece, skip_to
from serving.api.http.parsing.written_json import WrittenObject, read_object

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEAD = 2048
_BETWEEN = " \t\r\n,[]"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_TAG_HEAD = CallHead(CALL, ARGUMENTS + " ", ahead=r"(?=\S)")
_TAG = re.compile(r"(?:functions\.)?(.+?)(:\d{1,9})?", re.DOTALL)


class JsonCalls(CallParser):
    """Parses these calls.

    If an object starts with its name and then its arguments, the parser returns the arguments as they arrive, as valid
    JSON. Otherwise it returns them when the object is complete.
    """

    def __init__(self, closing: str, numbering: CallNumbering) -> None:
        super().__init__(closing, numbering)
        self._object = WrittenObject(closing)
        """The current object."""
        self._valid = ""
        """Output of `_object` while the name is unknown."""
        self._after_arguments = False

    def _between(self) -> list[CallPiece]:
        after = "} \t\r\n" if self._after_arguments else ""
        self._text = self._text.lstrip(_BETWEEN + after)
        if self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif self._text.startswith("{"):
            self._object, self._seen, self._valid = WrittenObject(self._closing), 0, ""
            self._read = self._head
        elif self._text and not self._closing.startswith(self._text):
            if self.began:  # other fields of an object, after its arguments
                self._text = skip_to(self._text, self._closing, "{")
            else:
                self._end("")
        return []

    def _head(self) -> list[CallPiece]:
        """Reads an object up to the call's name."""
        matched = _HEAD.match(self._text) if self._seen <= _LONGEST_HEAD else None
        if matched is not None and matched.end() <= _LONGEST_HEAD:
            self._text = self._text[matched.end() :]
            self._object, self._seen = WrittenObject(self._closing), 0
            self._read, self.began = self._arguments, True
            return [self._numbering.begin(_name(matched[1]))]
        self._seen, valid, complete = self._object.push(self._text, self._seen)
        self._valid += valid
        if not complete:
            return []
        self._text, self._read, self._seen = self._text[self._seen :], self._between, 0
        call = None if self._object.broken else _call_in(self._valid)
        if call is None:
            if not self.began:
                self._end("")
            return []
        self.began = True
        return [self._numbering.begin(call[0]), self._numbering.more(json.dumps(call[1], ensure_ascii=False))]

    def _arguments(self) -> list[CallPiece]:
        read, shown, complete = self._object.push(self._text)
        self._text = self._text[read:]
        if complete:
            self._read, self._after_arguments = self._between, True
        return [self._numbering.more(shown)] if shown else []


class TaggedCalls(JsonCalls):
    """Parses calls with a tag before the arguments, each with its own marks.

    `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: the tag is also the call's
    id, because models expect it in later turns.
    """

    _tag = ""
    """Tag of the current call."""

    def _between(self) -> list[CallPiece]:
        self._text = self._text.lstrip()
        if matched := _TAG_HEAD.match(self._text):
            self._tag, self._text = matched[1].strip(), self._text[matched.end() :]
            self._object, self._read = WrittenObject(CALL_END), self._head
            if self._text.startswith("{"):
                self._read = self._arguments
                return [self._begin()]
        elif self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif self._text and not (_TAG_HEAD.may_follow(self._text) or self._closing.startswith(self._text)):
            if self.began:
                self._text = skip_to(self._text, self._closing, CALL)
            else:
                self._end("")
        return []

    def _head(self) -> list[CallPiece]:
        """Reads arguments that are not an object."""
        text, end, rest = self._text.partition(CALL_END)
        if not end:
            return []
        self._text, self._read = rest, self._between
        try:
            arguments = object_of(parse_written(text))
        except ValueError:
            arguments = None
        return [self._begin(), self._numbering.more(json.dumps(arguments or {}, ensure_ascii=False))]

    def _begin(self) -> CallPiece:
        self.began = True
        matched = _TAG.fullmatch(self._tag)
        if matched is None:
            return self._numbering.begin(self._tag)
        return self._numbering.begin(matched[1], f"functions.{matched[1]}{matched[2]}" if matched[2] else None)


def _name(text: str) -> str:
    """Returns the value of a JSON string; its raw content if it has an invalid escape."""
    try:
        return str(parse_written(text))
    except ValueError:
        return text[1:-1]


def _call_in(text: str) -> tuple[str, dict[str, Any]] | None:
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
