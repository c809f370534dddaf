"""Calls with parameters as raw text between marks. The tool's schema determines which parameters are strings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.api.http.parsing.call_pieces import CallHead, CallNumbering, CallParser, CallPiece, may_begin, skip_to
from serving.api.http.parsing.written_json import read_untyped, schema_types


@dataclass(frozen=True)
class CallMarkup:
    """The marks of one format."""

    function: CallHead
    function_end: str
    """"" if only the mark after the calls ends a function."""
    parameter: CallHead
    parameter_end: str
    padding: str = ""
    """Text before and after each value."""


FUNCTION_MARKUP = CallMarkup(
    CallHead("<function=", ">"), "</function>", CallHead("<parameter=", ">"), "</parameter>", padding="\n"
)  # fmt: skip
"""`<function=name>`, then `<parameter=key>`, a value and `</parameter>` on separate lines, then `</function>`."""
ARGUMENT_MARKUP = CallMarkup(
    CallHead("", " ", name=r"[\w.\-]{1,256}", ahead="(?=<)"),
    "",
    CallHead("<arg_key>", "</arg_key> <arg_value>"),
    "</arg_value>",
)
"""`name<arg_key>key</arg_key><arg_value>value</arg_value>`."""


class MarkedCalls(CallParser):
    """Parses these calls. It returns strings as they arrive, and other values when they are complete.

    Args:
        closing, numbering, parameters: see `CallParser`.
        markup: marks of functions and parameters.
    """

    def __init__(
        self, closing: str, numbering: CallNumbering, parameters: Mapping[str, Mapping[str, Any]], markup: CallMarkup
    ) -> None:
        super().__init__(closing, numbering, parameters)
        self._markup = markup
        self._schema: Any = None
        """Schema of the current value, or None."""
        self._shown = False

    def _cut_off(self) -> list[CallPiece]:
        return [self._numbering.more("}")] if self._read == self._within_function else []

    def _between(self) -> list[CallPiece]:
        self._text = self._text.lstrip()
        head = self._markup.function
        if self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif matched := head.match(self._text):
            self._text, self._read = self._text[matched.end() :], self._within_function
            return self._begin_call(matched[1].strip())
        elif not head.may_follow(self._text) and not self._closing.startswith(self._text):
            if self.began:
                self._text = skip_to(self._text, self._closing, head.before or self._closing)
            else:
                self._end("")
        return []

    def _within_function(self) -> list[CallPiece]:
        """Reads text between two parameters."""
        self._text = self._text.lstrip()
        head = self._markup.parameter
        ends = [mark for mark in (self._markup.function_end, self._closing) if mark]
        for mark in ends:
            if self._text.startswith(mark):
                self._read = self._between
                if mark is not self._closing:
                    self._text = self._text[len(mark) :]
                return [self._numbering.more("}")]
        if matched := head.match(self._text):
            self._text, name = self._text[matched.end() :], matched[1].strip()
            self._schema, self._read, self._shown = self._schemas.get(name), self._value, False
            key = self._key(name)
            return [self._numbering.more(key + '"' if self._is_text else key)]
        if not head.may_follow(self._text) and not any(mark.startswith(self._text) for mark in ends):
            self._text = skip_to(self._text, *ends, head.before)
        return []

    @property
    def _is_text(self) -> bool:
        return schema_types(self._schema) == {"string"}

    def _value(self) -> list[CallPiece]:
        mark, padding = self._markup.parameter_end, self._markup.padding
        value, matched, after = self._text.partition(mark)
        if matched:
            value = value.removesuffix(padding)
            self._text, self._read = after, self._within_function
        elif self._is_text:
            value = value[: len(value) - may_begin(value, padding + mark, mark)]
            self._text = self._text[len(value) :]
        else:
            return []
        if value and not self._shown:
            self._shown, value = True, value.removeprefix(padding)
        if not self._is_text:
            return [self._numbering.more(json.dumps(read_untyped(value, self._schema), ensure_ascii=False))]
        end = '"' if matched else ""
        shown = json.dumps(value, ensure_ascii=False)[1:-1] + end
        return [self._numbering.more(shown)] if shown else []
