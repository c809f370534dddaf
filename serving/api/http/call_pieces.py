"""Pieces of tool calls, as they come out of a model's text."""

from __future__ import annotations

import re
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
        self._ids: set[str] = set()

    def begin(self, name: str, call_id: str | None = None) -> CallPiece:
        """The first piece of the next call. `call_id` is used unless an earlier call of the answer has it."""
        self.count += 1
        call_id = None if call_id is None else well_formed(call_id)
        if call_id is None or call_id in self._ids:
            call_id = f"call_{uuid.uuid4().hex}"
        self._ids.add(call_id)
        return CallPiece(self.count - 1, name=well_formed(name), id=call_id)

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


def skip_to(text: str, *marks: str) -> str:
    """`text` without its first character, up to one of `marks` or to what may become one."""
    found = [at for mark in marks if (at := text.find(mark, 1)) > 0]
    return text[min(found) :] if found else text[len(text) - may_begin(text[1:], *marks) :]


class Head:
    """The beginning of a call or of a parameter: a name between marks, of which only the first part may have come.

    Args:
        before: what stands before the name.
        after: what follows it; a space stands for any white space, or none.
        name: a regular expression; it matches any beginning of a name, too.
        ahead: a look-ahead expression for what comes then.
    """

    def __init__(self, before: str, after: str, *, name: str = r"[^<>\n]{1,256}", ahead: str = "") -> None:
        self.before, self._after = before, after
        atoms = [*map(re.escape, before), f"({name})"]
        atoms += [r"\s{0,16}" if letter == " " else re.escape(letter) for letter in after] + ([ahead] if ahead else [])
        self._whole = re.compile("".join(atoms))
        part = ""  # any number of atoms from the first on
        for atom in reversed(atoms):
            part = f"{atom}(?:{part})?" if part else atom
        self._part = re.compile(f"(?:{part})?")

    def write(self, name: str) -> str:
        """The head with a name, without white space."""
        return self.before + name + self._after.replace(" ", "")

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        """The head at a place of a text; the first group is the name."""
        return self._whole.match(text, at)

    def may_follow(self, text: str, at: int = 0) -> bool:
        """Whether the text from a place on may become a head when more of it comes."""
        return self._part.fullmatch(text, at) is not None
