"""Calls of tools in what a model writes, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from serving.api.http.call_formats import FORMATS
from serving.api.http.call_pieces import CallParser, CallPiece, Numbering, may_begin
from serving.api.http.json_calls import JsonCalls
from serving.api.http.marked_calls import MarkedCalls
from serving.api.http.protocol.chat import Tool
from serving.api.http.pythonic_calls import PythonicCalls
from serving.api.http.settings import ToolCallForm
from serving.api.http.tagged_calls import TaggedCalls

_PART = 4096
"""Characters that are read at a time, so that the cost of a character does not grow with the text."""


class ToolCallReader:
    """Takes one choice's text as it comes; tells what of it is for people, and what is new of the calls.

    A call's name comes out as soon as it is known, its arguments as they are written. What only looks like a call stays
    text.

    Args:
        form: how calls are written.
        tools: those of the request; they say which parameters are texts.
        most: calls beyond so many are left out.
        forced: the text is nothing but calls, so the beginning of one that was cut off is not shown.
    """

    def __init__(
        self, form: ToolCallForm, tools: Sequence[Tool], *, most: int | None = None, forced: bool = False
    ) -> None:
        self._format, self._most, self._forced = FORMATS[form], most, forced
        self._parameters = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._numbering = Numbering()
        self._parser: CallParser | None = None
        self._text = ""
        """What may become a call's mark; within calls, all since the mark, in case it is none."""
        self._space = ""

    @property
    def count(self) -> int:
        """Calls so far."""
        return self._numbering.count

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[CallPiece]]:
        """New text; `last` says that no more comes. Returns what to show, and the pieces of calls."""
        shown, pieces = "", list[CallPiece]()
        for at in range(0, max(len(text), 1), _PART):
            more, found = self._read(text[at : at + _PART], last=last and at + _PART >= len(text))
            shown += more
            pieces += found
        if self._most is not None:
            pieces = [piece for piece in pieces if piece.index < self._most]
        return self._without_space_around_calls(shown, last), pieces

    def _read(self, left: str, *, last: bool) -> tuple[str, list[CallPiece]]:
        shown, pieces = "", list[CallPiece]()
        begin = self._format.begin
        while True:
            if self._parser is None:
                left = self._text + left
                before, mark, after = left.partition(begin)
                if not mark:
                    held = 0 if last and not self._forced else may_begin(left, begin)
                    shown, self._text = shown + left[: len(left) - held], left[len(left) - held :]
                    break
                shown, self._text, left, self._parser = shown + before, mark, after, self._new_parser()
            parser = self._parser
            if not parser.began:
                self._text += left
            pieces += parser.push(left, last=last)
            if parser.began:
                self._text = ""
            if not parser.over:
                break
            self._parser = None
            if parser.began:
                left = parser.rest
            elif self._forced and last:  # cut off before its name was complete
                break
            else:  # no call: its mark is text, and what follows is looked at again
                shown += begin
                left, self._text = self._text[len(begin) :], ""
        return shown, pieces

    def _new_parser(self) -> CallParser:
        end = self._format.end
        match self._format.syntax:
            case "marked":
                assert self._format.markup is not None
                return MarkedCalls(end, self._numbering, self._parameters, self._format.markup)
            case "pythonic":
                return PythonicCalls(end, self._numbering, self._parameters)
            case "tagged":
                return TaggedCalls(end, self._numbering)
        return JsonCalls(end, self._numbering)

    def _without_space_around_calls(self, text: str, last: bool) -> str:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        return whole if last and not self.count else shown
