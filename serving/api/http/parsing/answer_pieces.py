"""Pieces of answers and of their tool calls, as responses and events need them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from serving.api.http.protocol.chat import ToolCall


@dataclass
class AnswerPiece:
    """New output of a choice, in order: texts by kind, and pieces of calls, the first of which has name and id."""

    parts: list[tuple[Literal["reasoning", "text"], str] | ToolCall] = field(default_factory=list)

    def add(self, kind: Literal["reasoning", "text"], text: str) -> None:
        """Appends text."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, tuple) and last[0] == kind:
            self.parts[-1] = kind, last[1] + text
        elif text:
            self.parts.append((kind, text))

    def of(self, kind: Literal["reasoning", "text"]) -> str:
        """Returns the text of a kind."""
        return "".join(part[1] for part in self.parts if isinstance(part, tuple) and part[0] == kind)

    @property
    def calls(self) -> list[ToolCall]:
        """The pieces of calls."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


class TrimmedText:
    """Text without the white space at its end, and at its beginning if `strip`."""

    def __init__(self, *, strip: bool) -> None:
        self._strip = strip
        self._space: list[str] = []

    def push(self, text: str) -> str:
        """Returns what to show of the text so far."""
        if self._strip:
            text = text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._space.append(text)
            return ""
        before, self._space, self._strip = self.rest(), [text[len(shown) :]], False
        return before + shown

    def rest(self) -> str:
        """Returns the white space at the end."""
        space, self._space = "".join(self._space), []
        return space


def whole_calls(pieces: Iterable[ToolCall]) -> list[ToolCall]:
    """Joins pieces to complete calls."""
    calls: dict[int | None, ToolCall] = {}
    for piece in pieces:
        if piece.index in calls:
            calls[piece.index].function.arguments += piece.function.arguments
        else:
            calls[piece.index] = ToolCall(id=piece.id, type=piece.type, function=piece.function.model_copy())
    return list(calls.values())
