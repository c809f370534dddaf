"""Calls with a tag before the arguments. Each call has its own marks.

<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

import json
import re

from serving.api.http.json_values import parse_written
from serving.api.http.parsing.call_pieces import CallPiece, Head, skip_to
from serving.api.http.parsing.json_calls import JsonCalls, object_of
from serving.api.http.parsing.written_object import WrittenObject

CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = Head(CALL, ARGUMENTS + " ", ahead=r"(?=\S)")
_TAG = re.compile(r"(?:functions\.)?(.+?)(:\d{1,9})?", re.DOTALL)


class TaggedCalls(JsonCalls):
    """Parses these calls. A tag `functions.name:0` is also the call's id, because models expect it in later turns."""

    _tag = ""
    """Tag of the current call."""

    def _between(self) -> list[CallPiece]:
        """Reads text before a call, or after its arguments."""
        self._text = self._text.lstrip()
        if matched := _HEAD.match(self._text):
            self._tag, self._text = matched[1].strip(), self._text[matched.end() :]
            self._object, self._seen = WrittenObject(CALL_END), 0
            if self._text.startswith("{"):
                self._in_arguments = True
                return [self._begin()]
        elif self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif self._text and not (_HEAD.may_follow(self._text) or self._closing.startswith(self._text)):
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
        self._text, self._object = rest, None
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
