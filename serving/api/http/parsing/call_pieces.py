"""Pieces of tool calls, and helpers for parsing them from a model's text."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from serving.api.http.json_values import well_formed
from serving.api.http.protocol.chat import CalledFunction, ToolCall

_NO_PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class CallPiece:
    """New output of one call. The first piece of a call has its name and its id."""

    index: int
    """Index of the call in the answer."""
    arguments: str = ""
    """Text to append to the call's arguments. The complete arguments are one JSON object."""
    name: str | None = None
    id: str | None = None


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


class CallParser(ABC):
    """Reads the text between the marks of one or more calls, as it arrives.

    Args:
        closing: the mark after the calls.
        numbering: numbers the answer's calls.
        parameters: JSON schemas of the tools' parameters, by name of the tool.
    """

    def __init__(
        self, closing: str, numbering: CallNumbering, parameters: Mapping[str, Mapping[str, Any]] = _NO_PARAMETERS
    ) -> None:
        self._closing, self._numbering, self._parameters = closing, numbering, parameters
        self._schemas: Mapping[str, Any] = {}
        """JSON schemas of the current function's parameters."""
        self._keys: list[str] = []
        """Arguments of the current call so far."""
        self._text = ""
        """Text that has not been consumed."""
        self._seen = 0
        """Length of the beginning of `_text` that has been examined."""
        self._read: Callable[[], list[CallPiece]] = self._between
        """The state: reads the beginning of `_text`."""
        self._last = False
        """No more text follows."""
        self.began = False
        """The parser has returned a piece of a call."""
        self.over = False
        """The text has reached the closing mark (if `began`), or is not a call."""
        self.rest = ""
        """The text after the closing mark."""

    def push(self, text: str, *, last: bool) -> list[CallPiece]:
        """Reads new text. `last`: the text ends here."""
        self._text += text
        self._last = last
        pieces: list[CallPiece] = []
        while not self.over:
            before = len(self._text), self._seen, self._read
            pieces += self._read()
            if before == (len(self._text), self._seen, self._read):
                break
        if last and not self.over:
            pieces += self._cut_off()
            self._end("")
        return pieces

    @abstractmethod
    def _between(self) -> list[CallPiece]:
        """Reads text before or after a call."""

    def _cut_off(self) -> list[CallPiece]:
        """Returns the last pieces of a call whose text ends before the closing mark."""
        return []

    def _begin_call(self, name: str) -> list[CallPiece]:
        """Returns the pieces of the beginning of a call with named arguments."""
        schemas = self._parameters.get(name, {}).get("properties")
        self._schemas, self._keys = schemas if isinstance(schemas, Mapping) else {}, []
        self.began = True
        return [self._numbering.begin(name), self._numbering.more("{")]

    def _key(self, name: str) -> str:
        """Returns the text before the value of the next argument."""
        self._keys.append(name)
        return f"{', ' if len(self._keys) > 1 else ''}{json.dumps(name, ensure_ascii=False)}: "

    def _end(self, rest: str) -> None:
        self.over, self.rest, self._text = True, rest, ""


def whole_calls(pieces: Iterable[CallPiece]) -> list[ToolCall]:
    """Joins pieces to complete calls."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if piece.name is not None and piece.id is not None:
            function = CalledFunction(name=piece.name, arguments="")
            calls[piece.index] = ToolCall(id=piece.id, type="function", function=function)
        calls[piece.index].function.arguments += piece.arguments
    return list(calls.values())


def may_begin(text: str, *marks: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for size in range(longest, 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def skip_to(text: str, *marks: str) -> str:
    """Returns `text` from the first mark after its first character, or from a suffix that may become a mark."""
    positions = [at for mark in marks if (at := text.find(mark, 1)) > 0]
    return text[min(positions) :] if positions else text[len(text) - may_begin(text[1:], *marks) :]


class CallHead:
    """The beginning of a call or of a parameter: a name between marks. Also recognises incomplete heads.

    Args:
        before: text before the name.
        after: text after the name; a space matches any white space, or none.
        name: a regular expression that also matches any prefix of a name.
        ahead: a look-ahead expression for the text after the head.
    """

    def __init__(self, before: str, after: str, *, name: str = r"[^<>\n]{1,256}", ahead: str = "") -> None:
        self.before, self._after = before, after
        atoms = [*map(re.escape, before), f"({name})"]
        atoms += [r"\s{0,16}" if letter == " " else re.escape(letter) for letter in after] + ([ahead] if ahead else [])
        self._whole = re.compile("".join(atoms))
        part = ""  # matches any number of atoms, starting with the first
        for atom in reversed(atoms):
            part = f"{atom}(?:{part})?" if part else atom
        self._part = re.compile(f"(?:{part})?")

    def write(self, name: str) -> str:
        """Returns the head with `name`, without white space."""
        return self.before + name + self._after.replace(" ", "")

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        """Matches a head at `at`; the first group is the name."""
        return self._whole.match(text, at)

    def may_follow(self, text: str, at: int = 0) -> bool:
        """Returns whether the text from `at` is the beginning of a head."""
        return self._part.fullmatch(text, at) is not None
