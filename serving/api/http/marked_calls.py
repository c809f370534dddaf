"""Calls whose parameters stand between marks, as they are; the tool's schema says which of them are texts.

<function=name>
<parameter=key>
value
</parameter>
</function>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.api.http.call_pieces import CallPiece, Numbering, may_begin
from serving.api.http.json_values import parse_written

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 256


class MarkedCalls:
    """The parser. Texts come out as they are written, other values when they are complete.

    Args:
        closing: the mark after the calls.
        numbering: of the answer's calls.
        parameters: JSON schemas of the tools' parameters.
    """

    def __init__(self, closing: str, numbering: Numbering, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._closing, self._numbering, self._parameters = closing, numbering, parameters
        self._text = ""
        self._schemas: Mapping[str, Any] = {}
        """Of the parameters of the function that is being read."""
        self._in_function = False
        self._value: Any = None
        """Schema of the value that is being read, or None."""
        self._in_value = self._shown = False
        self._given = 0
        """Parameters so far."""
        self.began = self.over = False
        self.rest = ""

    def push(self, text: str, *, last: bool) -> list[CallPiece]:
        """As `CallParser.push`."""
        self._text += text
        pieces: list[CallPiece] = []
        while not self.over:
            before = self._text, self._in_function
            if self._in_value:
                pieces += self._more_of_value()
            elif self._in_function:
                pieces += self._within_function()
            else:
                pieces += self._between()
            if before == (self._text, self._in_function):
                break
        if last and not self.over:
            if self._in_function and not self._in_value:
                pieces.append(self._numbering.more("}"))
            self._end("")
        return pieces

    def _end(self, rest: str) -> None:
        self.over, self.rest, self._text = True, rest, ""

    def _between(self) -> list[CallPiece]:
        """Before a function, or after one."""
        self._text = self._text.lstrip()
        if self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif (name := self._named(_FUNCTION)) is not None:
            schemas = self._parameters.get(name, {}).get("properties")
            self._schemas = schemas if isinstance(schemas, Mapping) else {}
            self._in_function, self.began, self._given = True, True, 0
            return [self._numbering.begin(name), self._numbering.more("{")]
        elif self._text and not self._could_be(self._closing, _FUNCTION):
            if self.began:
                self._skip(self._closing, _FUNCTION)
            else:
                self._end("")
        return []

    def _within_function(self) -> list[CallPiece]:
        """Between two parameters."""
        self._text = self._text.lstrip()
        for mark in (_FUNCTION_END, self._closing):
            if self._text.startswith(mark):
                self._in_function = False
                if mark is _FUNCTION_END:
                    self._text = self._text[len(mark) :]
                return [self._numbering.more("}")]
        if (name := self._named(_PARAMETER)) is not None:
            self._value, self._in_value, self._shown = self._schemas.get(name), True, False
            self._given += 1
            key = f"{', ' if self._given > 1 else ''}{json.dumps(name, ensure_ascii=False)}: "
            return [self._numbering.more(key + '"' if self._is_text else key)]
        if self._text and not self._could_be(self._closing, _FUNCTION_END, _PARAMETER):
            self._skip(self._closing, _FUNCTION_END, _PARAMETER)
        return []

    @property
    def _is_text(self) -> bool:
        return isinstance(self._value, Mapping) and self._value.get("type") == "string"

    def _more_of_value(self) -> list[CallPiece]:
        value, mark, after = self._text.partition(_PARAMETER_END)
        if mark:
            value = value.removesuffix("\n")
            self._text, self._in_value = after, False
        elif self._is_text:
            value = value[: len(value) - may_begin(value, "\n" + _PARAMETER_END, _PARAMETER_END)]
            self._text = self._text[len(value) :]
        else:
            return []
        if value and not self._shown:
            self._shown, value = True, value.removeprefix("\n")
        if not self._is_text:
            return [self._numbering.more(json.dumps(_read(value), ensure_ascii=False))]
        end = '"' if mark else ""
        shown = json.dumps(value, ensure_ascii=False)[1:-1] + end
        return [self._numbering.more(shown)] if shown else []

    def _named(self, mark: str) -> str | None:
        """The name after a mark, which is taken off; None where there is none, or not all of it."""
        if not self._text.startswith(mark):
            return None
        name, end, after = self._text[len(mark) :].partition(">")
        if not end or "\n" in name:
            return None
        self._text = after
        return name.strip()

    def _could_be(self, *marks: str) -> bool:
        """Whether the text may become one of the marks, or is one with a name that is incomplete."""
        named = (self._text[len(mark) :] for mark in (_FUNCTION, _PARAMETER) if self._text.startswith(mark))
        unnamed = any("\n" not in name and ">" not in name and len(name) < _LONGEST_NAME for name in named)
        return unnamed or any(mark.startswith(self._text) for mark in marks)

    def _skip(self, *marks: str) -> None:
        """Drop text up to one of the marks, or to what may become one."""
        found = [at for mark in marks if (at := self._text.find(mark, 1)) > 0]
        self._text = (
            self._text[min(found) :] if found else self._text[len(self._text) - may_begin(self._text, *marks) :]
        )


def _read(text: str) -> Any:
    try:
        return parse_written(text)
    except ValueError:
        return text
