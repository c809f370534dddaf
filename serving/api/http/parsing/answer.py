"""Splits one choice's text into reasoning, answer and tool calls, whole or as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.api.http.parsing.call_formats import FORMATS
from serving.api.http.parsing.call_pieces import CallNumbering, CallParser, CallPiece, may_begin
from serving.api.http.parsing.json_calls import JsonCalls, TaggedCalls
from serving.api.http.parsing.marked_calls import MarkedCalls
from serving.api.http.parsing.pythonic_calls import PythonicCalls
from serving.api.http.parsing.reasoning import ReasoningReader
from serving.api.http.protocol.chat import Tool
from serving.api.http.settings import ToolCallForm

_PART = 4096
"""Maximum characters read at a time, so that the cost per character does not grow with the length of the text."""


@dataclass
class AnswerPiece:
    """New output of a choice."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class AnswerReader:
    """Reads one choice's text as it arrives. It looks for calls in the answer, never in the reasoning.

    Args:
        reasoning: None if all of the text is the answer.
        calls: None to leave calls in the text.
    """

    def __init__(self, reasoning: ReasoningReader | None, calls: ToolCallReader | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def called(self) -> bool:
        """Whether the text contains a call so far."""
        return self._calls is not None and self._calls.count > 0

    def push(self, text: str, *, last: bool = False) -> AnswerPiece:
        """Reads new text. `last`: the text ends here."""
        piece = AnswerPiece(text=text)
        if self._reasoning is not None:
            piece.reasoning, piece.text = self._reasoning.push(text, last=last)
        if self._calls is not None:
            piece.text, piece.calls = self._calls.push(piece.text, last=last)
        return piece


class ToolCallReader:
    """Splits one choice's text into text to show and pieces of calls, as it arrives.

    It returns a call's name as soon as it is known, and the arguments as they arrive. Text that only resembles a call
    remains text.

    Args:
        form: format of calls.
        tools: the request's tools; their schemas determine which parameters are strings.
        most: maximum number of calls; further ones are dropped.
        forced: the text consists of calls only, so an incomplete call at its end is not shown.
    """

    def __init__(
        self, form: ToolCallForm, tools: Sequence[Tool], *, most: int | None = None, forced: bool = False
    ) -> None:
        self._format, self._most, self._forced = FORMATS[form], most, forced
        self._parameters = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._numbering = CallNumbering()
        self._parser: CallParser | None = None
        self._text = ""
        """Text that may become a mark; before a call is recognised, all text after its mark, in case it is no call."""
        self._space = ""

    @property
    def count(self) -> int:
        """Number of calls so far."""
        return self._numbering.count

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[CallPiece]]:
        """Reads new text. `last`: the text ends here. Returns the text to show, and the pieces of calls."""
        shown, pieces = "", list[CallPiece]()
        for at in range(0, max(len(text), 1), _PART):
            more, new = self._read(text[at : at + _PART], last=last and at + _PART >= len(text))
            shown += more
            pieces += new
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
            elif self._forced and last:  # the text ends before the name is complete
                break
            else:  # not a call: the mark is text, and the text after it is read again
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
