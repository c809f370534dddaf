"""Pieces of answers and of their tool calls, as responses and events need them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from serving.api.http.json_values import well_formed
from serving.api.http.protocol.chat import CalledFunction, ToolCall


@dataclass(frozen=True)
class CallPiece:
    """New output of one call. The first piece of a call has its name and its id."""

    index: int
    """Index of the call in the answer."""
    arguments: str = ""
    """Text to append to the call's arguments. The complete arguments are one JSON object."""
    name: str | None = None
    id: str | None = None


@dataclass
class AnswerPiece:
    """New output of a choice, in order: texts by kind, and pieces of calls."""

    parts: list[tuple[Literal["reasoning", "text"], str] | CallPiece] = field(default_factory=list)

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
    def calls(self) -> list[CallPiece]:
        """The pieces of calls."""
        return [part for part in self.parts if isinstance(part, CallPiece)]


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


class CallNumbering:
    """Assigns numbers and ids to calls, and makes all text of calls well-formed."""

    def __init__(self) -> None:
        self.count = 0
        """Number of calls so far."""
        self._ids: set[str] = set()

    def begin(self, name: str, call_id: str | None = None) -> CallPiece:
        """Returns the first piece of the next call, with `call_id` unless an earlier call of the answer has the same
        id."""
        self.count += 1
        call_id = None if call_id is None else well_formed(call_id)
        if call_id is None or call_id in self._ids:
            call_id = f"call_{uuid.uuid4().hex}"
        self._ids.add(call_id)
        return CallPiece(self.count - 1, name=well_formed(name), id=call_id)

    def more(self, arguments: str) -> CallPiece:
        """Returns a piece with more arguments of the latest call."""
        return CallPiece(self.count - 1, well_formed(arguments))


def whole_calls(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """Joins pieces to complete calls."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if piece.name is not None and piece.id is not None:
            function = CalledFunction(name=piece.name, arguments="")
            calls[piece.index] = ToolCall(id=piece.id, type="function", function=function)
        calls[piece.index].function.arguments += piece.arguments
    return list(calls.values())
