"""Calls of functions that a model writes into its answer, in the form that its chat template has taught it.

| form | a call looks like | for example |
|---|---|---|
| `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Granite 4 |
| `nemotron` | `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>` | Nemotron Nano v2 |
| `qwen3_coder` | `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` | Nemotron 3 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from checkpoints.tokenizer import Tokenizer
from serving.api.http.call_pieces import CallParser, CallPiece, Numbering, may_begin
from serving.api.http.json_calls import JsonCalls
from serving.api.http.marked_calls import MarkedCalls
from serving.api.http.protocol.chat import Tool

ToolCallForm = Literal["hermes", "nemotron", "qwen3_coder"]


class Marks(NamedTuple):
    """What stands before and after calls."""

    begin: str
    end: str


MARKS: dict[ToolCallForm, Marks] = {
    "hermes": Marks("<tool_call>", "</tool_call>"),
    "nemotron": Marks("<TOOLCALL>", "</TOOLCALL>"),
    "qwen3_coder": Marks("<tool_call>", "</tool_call>"),
}


def form_of(tokenizer: Tokenizer | None) -> ToolCallForm | None:
    """The form that the model's chat template speaks of; None where it speaks of none."""
    if tokenizer is None:
        return None
    signs: dict[str, ToolCallForm] = {"<TOOLCALL>": "nemotron", "<function=": "qwen3_coder", "<tool_call>": "hermes"}
    return next((form for sign, form in signs.items() if tokenizer.chat_template_mentions(sign)), None)


class ToolCallReader:
    """Takes one choice's text as it comes; tells what of it is for people, and what is new of the calls.

    A call's name comes out as soon as it is known, its arguments as they are written. What only looks like a call stays
    text.

    Args:
        form: how calls are written.
        tools: those of the request; they say which parameters are texts.
        most: calls beyond so many are left out.
    """

    def __init__(self, form: ToolCallForm, tools: Sequence[Tool], *, most: int | None = None) -> None:
        self._form, self._marks, self._most = form, MARKS[form], most
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
        left = text
        while True:
            if self._parser is None:
                left = self._text + left
                before, mark, after = left.partition(self._marks.begin)
                if not mark:
                    held = 0 if last else may_begin(left, mark := self._marks.begin)
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
            else:  # no call: its mark is text, and what follows is looked at again
                shown += self._marks.begin
                left, self._text = self._text[len(self._marks.begin) :], ""
        if self._most is not None:
            pieces = [piece for piece in pieces if piece.index < self._most]
        return self._without_space_around_calls(shown, last), pieces

    def _new_parser(self) -> CallParser:
        if self._form == "qwen3_coder":
            return MarkedCalls(self._marks.end, self._numbering, self._parameters)
        return JsonCalls(self._marks.end, self._numbering)

    def _without_space_around_calls(self, text: str, last: bool) -> str:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        return whole if last and not self.count else shown
