"""What one choice's text says: reasoning, answer, calls of tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serving.api.http.call_pieces import CallPiece
from serving.api.http.reasoning import ReasoningReader
from serving.api.http.tool_calls import ToolCallReader


@dataclass
class AnswerPiece:
    """What is new of a choice."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class AnswerReader:
    """Takes one choice's text as it comes. Calls are looked for in the answer, never in the reasoning.

    Args:
        reasoning: None where all of the text is the answer.
        calls: None where calls are left in the text.
    """

    def __init__(self, reasoning: ReasoningReader | None, calls: ToolCallReader | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def called(self) -> bool:
        """Whether there has been a call."""
        return self._calls is not None and self._calls.count > 0

    def push(self, text: str, *, last: bool = False) -> AnswerPiece:
        """New text; `last` says that no more comes."""
        piece = AnswerPiece(text=text)
        if self._reasoning is not None:
            piece.reasoning, piece.text = self._reasoning.push(text, last=last)
        if self._calls is not None:
            piece.text, piece.calls = self._calls.push(piece.text, last=last)
        return piece


NewReader = Callable[[], AnswerReader]
"""Makes a reader for each choice."""
