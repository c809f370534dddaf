"""Pieces of tool calls, as they come out of a model's text."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from serving.api.http.json_values import well_formed
from serving.api.http.protocol.chat import CalledFunction, ToolCall


@dataclass(frozen=True)
class CallPiece:
    """What is new of one call. The first piece of a call has its name and its id."""

    index: int
    """Which call of the answer."""
    arguments: str = ""
    """Text to append to the call's arguments, which are one JSON object in the end."""
    name: str | None = None
    id: str | None = None


class CallParser(Protocol):
    """Reads what stands between the marks of one or more calls, as it comes."""

    began: bool
    """Something of a call has come out."""
    over: bool
    """The closing mark has come, or what came is no call. (`began` tells which.)"""
    rest: str
    """What came after the closing mark."""

    def push(self, text: str, *, last: bool) -> list[CallPiece]:
        """New text; `last` says that no more comes."""
        ...


class Numbering:
    """Gives calls their numbers and ids. Everything that a model writes as a call passes through here, so this is where
    it is made well-formed."""

    def __init__(self) -> None:
        self.count = 0
        """Calls so far."""

    def begin(self, name: str) -> CallPiece:
        """The first piece of the next call."""
        self.count += 1
        return CallPiece(self.count - 1, name=well_formed(name), id=f"call_{uuid.uuid4().hex}")

    def more(self, arguments: str) -> CallPiece:
        """More of the arguments of the latest call."""
        return CallPiece(self.count - 1, well_formed(arguments))


def whole_calls(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """Complete calls of all their pieces."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if piece.name is not None and piece.id is not None:
            function = CalledFunction(name=piece.name, arguments="")
            calls[piece.index] = ToolCall(id=piece.id, type="function", function=function)
        calls[piece.index].function.arguments += piece.arguments
    return list(calls.values())


def may_begin(text: str, *marks: str) -> int:
    """Length of the longest end of `text` that may be the beginning of one of `marks`, and is not all of it."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for size in range(longest, 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
