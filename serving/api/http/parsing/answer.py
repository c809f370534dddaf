"""Splits one choice's text into reasoning, answer and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serving.api.http.parsing.call_pieces import CallPiece
from serving.api.http.parsing.reasoning import ReasoningReader
from serving.api.http.parsing.tool_calls import ToolCallReader


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


NewReader = Callable[[], AnswerReader]
"""Creates a reader for each choice."""
