"""Makes JSON of the objects that models write, while they arrive.

Without a grammar, a model may write `NaN`, invalid escapes, superfluous commas, or omit commas. Clients parse a call's
arguments as JSON, so one such error would make the whole answer unusable.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from typing import Any

from serving.api.http.json_values import MAX_DEPTH, parse_written, well_formed
from serving.api.http.parsing.text_cursor import TextCursor, Wait

_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_SPACE = re.compile(r"[ \t\r\n]+|\s")
_MORE, _WORD = r"\s{0,4096}", r"[\w$.+-]{1,4096}"


def _after(python: bool) -> re.Pattern[str]:
    """Matches text after a string: another element of the object, also where its comma is missing, or much white
    space."""
    item = rf"""["'\[{{\]}}),<]|//|/\*|#|{_WORD}+{_MORE}+[:,\]}})<]"""
    item += rf"""|\(|[rRbBfFuU]{{1,2}}["']|{_WORD}+\(""" if python else ""
    return re.compile(rf"""\s{{4096}}|\s*+(?:[:\]}})]|["'][^\s,}}\]]|,(?:\s{{4096}}|\s*+(?:{item})))""")


_AFTER = {python: _after(python) for python in (False, True)}
_AFTER_ARGUMENT = re.compile(r"\s{64}|\s*+[,)]")
_AFTER_BEGINS = re.compile(rf"""{_MORE}(?:["']|,{_MORE}(?:/|{_WORD}{_MORE})?)?""")
_STRAY = re.compile(rf"{_MORE}(?:[;.|\]][\s}}\]]{{0,64}})?")
"""A superfluous sign and brackets before a closing mark."""
_BARE = re.compile(r'[^\s{}\[\]",:<]+')
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|u{_HEX}{{4}}|x{_HEX}{{2}}|U{_HEX}{{8}}|[0-7]{{1,3}}|.)",
    re.DOTALL,
)
"""An escape in a string of JSON or Python; a surrogate pair counts as one escape."""
_ESCAPE_PART = re.compile(
    rf"\\(?:x{_HEX}?|U{_HEX}{{0,7}}|[0-7]{{1,2}}|u{_HEX}{{0,3}}|u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u{_HEX}{{0,3}})?)?)?"
)
"""Text that may become an escape or a longer escape."""
_VALID_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u.)')
"""The beginning of an escape that is valid in JSON."""
_LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\\": "\\", '"': '"',
    "'": "'", "/": "/",
}  # fmt: skip
_NAMES = ("name", "function", "tool", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input", "kwargs", "tool_args", "tool_input")
"""Fields of a call in JSON."""
_PYTHON_BARE = re.compile(r'[^\s{}\[\]()",:<]+')
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


class WrittenObject:
    """Reads an object in pieces and returns it as valid JSON. Reads each character once.

    Valid JSON is unchanged. Values that JSON does not have become strings, missing values and values nested more than
    `MAX_DEPTH` levels deep become null, missing separators are added, and superfluous ones are removed.

    Args:
        closing: the marks after the call or all calls; they end the object anywhere except in strings.
        python: the object is a literal of Python: with its escapes and numbers, and with tuples, which become arrays.
        quote: instead of an object, read a string up to this quote. The string is an argument of a call in Python.
    """

    def __init__(self, *closing: str, python: bool = False, quote: str = "") -> None:
        self._closing, self._python = closing, python
        self._after = _AFTER_ARGUMENT if quote else _AFTER[python]
        self._words = _PYTHON_BARE if python else _BARE
        self._open: list[str] = []
        """Closing brackets of the open arrays and objects."""
        self._arrays = 0
        """Number of open arrays."""
        self._expects = "value"
        """The expected next element: key, colon, value or comma."""
        self._comma = ""
        """A comma and the space after it, held back until another item follows."""
        self._bare = ""
        """The current number or word, until it ends."""
        self._quote = quote
        """The quote that ends the current string. Models also write single quotes."""
        self._out: list[str] = []
        self.broken = False
        """The closing mark of the calls occurred within the object."""
        self.keyed = True
        """Every key of an object so far had a colon, and every value a key."""
        self.first_keyed: bool | None = None
        """The same of the first key; None as long as that is not known."""

    def push(self, text: str, at: int = 0) -> tuple[int, str, bool]:
        """Reads `text` from `at`. Returns the position after the text read, its valid JSON, and whether the object
        ends.

        The caller passes the remaining text again, followed by new text.
        """
        complete = False
        while at < len(text) and not complete:
            before = at
            if self._quote:
                at = self._string(text, at)
                complete = not (self._quote or self._open)
            else:
                at, complete = self._structure(text, at)
            if at == before and not complete:
                break
        written, self._out = "".join(self._out), []
        return at, written, complete

    def close(self) -> str:
        """Returns the JSON that completes the object where its text ends."""
        if self._quote:
            self._end_string()
        self._close()
        written, self._out = "".join(self._out), []
        return written

    def _string(self, text: str, at: int) -> int:
        quote = self._quote
        if (plain := _PLAIN[quote[0]].match(text, at)) is not None:
            self._write(plain[0])
            return plain.end()
        if text.startswith(quote, at):
            ends = self._ends_string(text, at + len(quote))
            if ends:
                self._end_string()
                return at + len(quote)
            if ends is None:
                return at
        elif quote.startswith(text[at : at + len(quote)]):  # perhaps a triple quote
            return at
        if text[at] != "\\":
            self._write(json.dumps(text[at])[1:-1])
            return at + 1
        if _ESCAPE_PART.fullmatch(text, at) or (escape := _ESCAPE.match(text, at)) is None:
            return at
        value, valid = _unescaped(escape[0]), _VALID_ESCAPE.match(escape[0])
        if not (valid or self._python or escape[0] == f"\\{quote}"):
            self._write("\\\\")
            return at + 1
        self._write(escape[0] if valid and value != "\N{REPLACEMENT CHARACTER}" else json.dumps(value)[1:-1])
        return escape.end()

    def _ends_string(self, text: str, at: int) -> bool | None:
        """Returns whether a quote before `at` ends a string, because models forget to escape quotes: a value ends only
        where the object can go on. None if more text decides."""
        if self._expects == "key" or self._after.match(text, at):
            return True
        if _AFTER_BEGINS.fullmatch(text, at):
            return None
        begin = at if (stray := _STRAY.match(text, at)) is None else stray.end()
        rest = text[begin : begin + 104]
        if rest.startswith(self._closing):
            return True
        return None if any(mark.startswith(rest) for mark in self._closing) else False

    def _end_string(self) -> None:
        self._write('"')
        self._quote = ""
        self._expects = "colon" if self._expects == "key" else "comma"

    def _structure(self, text: str, at: int) -> tuple[int, bool]:
        letter = text[at]
        if letter == "<":  # JSON contains it only in strings
            if text.startswith(self._closing, at):
                self.broken = True
                self._close()
                return at, True
            if any(mark.startswith(text[at : at + len(mark)]) for mark in self._closing):
                return at, False
            self._bare += letter
            return at + 1, False
        if letter == '"' or (letter == "'" and not self._bare and self._expects != "comma"):
            self._end_bare()
            self._begin_item(may_be_key=True)
            self._write('"')
            self._quote = letter
            return at + 1, False
        if (bare := self._words.match(text, at)) is not None:
            self._bare += bare[0]
            return bare.end(), False
        self._end_bare()
        if (space := _SPACE.match(text, at)) is not None:
            shown = " " if space[0].strip(" \t\r\n") else space[0]
            if self._comma:
                self._comma += shown
            else:
                self._write(shown)
            return space.end(), False
        if letter in ("{[(" if self._python else "{["):
            letter = "{" if letter == "{" else "["
            self._begin_item(may_be_key=False)
            if len(self._open) == MAX_DEPTH:
                self._write("null")
            self._open.append("}" if letter == "{" else "]")
            self._arrays += letter == "["
            self._write(letter)
            self._expects = self._item()
        elif letter == ":":
            if self._expects == "colon":
                self._end_key(":", colon=True)
        elif letter == ",":
            self._complete_member()
            if self._expects == "comma":
                self._comma, self._expects = ",", self._item()
        elif letter == "}" or self._arrays:
            self._close("]" if self._python and letter == ")" else letter)
        return at + 1, not self._open

    def _item(self) -> str:
        """Returns the first element of an item in the innermost array or object: key or value."""
        return "key" if self._open[-1] == "}" else "value"

    def _begin_item(self, *, may_be_key: bool) -> None:
        """Writes the missing separators and keys before a string or a value."""
        if self._expects == "comma":
            self._write(", ")
            self._expects = self._item()
        elif self._expects == "colon":
            self._end_key(": ", colon=False)
        self._write(self._comma)
        self._comma = ""
        if self._expects == "key" and not may_be_key:
            self._end_key('"": ', colon=False)

    def _complete_member(self) -> None:
        """Writes null for a key without a value."""
        if self._expects == "colon":
            self._end_key(": null", colon=False)
            self._expects = "comma"
        elif self._expects == "value" and self._item() == "key":
            self._write(" null")
            self._expects = "comma"

    def _end_key(self, text: str, *, colon: bool) -> None:
        """Writes the text after a key; `colon`: the model has written it."""
        self._write(text)
        self._expects = "value"
        self.keyed = self.keyed and colon
        self.first_keyed = colon if self.first_keyed is None else self.first_keyed

    def _close(self, bracket: str = "") -> None:
        """Closes the innermost array or object with this bracket, and everything in it; without a bracket all."""
        self._end_bare()
        while self._open:
            self._complete_member()
            self._comma = ""
            closed = self._open[-1]
            self._write(closed)
            self._open.pop()
            self._arrays -= closed == "]"
            self._expects = "comma"
            if closed == bracket:
                break

    def _end_bare(self) -> None:
        word, self._bare = self._bare, ""
        if not word or (self._expects == "comma" and not word.strip(";.|")):
            return
        self._begin_item(may_be_key=True)
        if self._expects == "key":
            self._write(json.dumps(word, ensure_ascii=False))
            self._expects = "colon"
            return
        try:
            parse_written(word)
        except ValueError:
            number = _python_number(word) if self._python else None
            word = _PYTHON_NAMES.get(word) or number or json.dumps(word, ensure_ascii=False)
        self._write(word)
        self._expects = "comma"

    def _write(self, text: str) -> None:
        if len(self._open) <= MAX_DEPTH:
            self._out.append(text)


def read_written(
    cursor: TextCursor, written: WrittenObject, emit: Callable[[str], object], consume: Callable[[str], object] = len
) -> Wait[None]:
    """Reads an object as it arrives, and passes its text to `consume`, then its JSON to `emit`."""
    complete = False
    with cursor.completing(lambda: emit(written.close())):
        while not complete:
            end, valid, complete = written.push(cursor.text, cursor.at)
            consume(cursor.take(end - cursor.at))
            emit(valid)
            if not complete:
                yield from cursor.more()


def _unescaped(escape: str) -> str:
    """Returns the text that an escape represents; the escape itself if it is invalid."""
    if escape[1] in "01234567":
        return chr(int(escape[1:], 8))
    if len(escape) == 2:
        return _LETTERS.get(escape[1], escape)
    try:
        return well_formed(escape.encode().decode("unicode_escape"))
    except UnicodeDecodeError:  # beyond Unicode
        return escape


def _python_number(word: str) -> str | None:
    """Returns a number in Python's spelling as JSON; None if the word is none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(word)
            if kind is int or math.isfinite(value):
                return json.dumps(value)
    return None


def object_of(value: Any, *, cut: bool = False) -> dict[str, Any] | None:
    """Returns arguments as an object; None if that is not possible. Some models write the object as a string with its
    JSON text. `cut`: the text may end before the object does, which then has what is written of it."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        written = WrittenObject()
        _, valid, complete = written.push(value.lstrip())
        if cut and not complete:
            valid, complete = valid + written.close(), True
        value = json.loads(valid) if complete else None
    return value if isinstance(value, dict) else None


def call_in(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the arguments of a call in JSON, in any order and under any of the usual names; None if the
    text is not a call."""
    try:
        call = parse_written(text)
    except ValueError:
        return None
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = next((call[word] for word in _NAMES if word in call), None)
    given = next((call[word] for word in _ARGUMENTS if call.get(word) not in (None, "", [])), None)
    if given is None:  # the call's other fields are its arguments
        given = {word: value for word, value in call.items() if word not in (*_NAMES, *_ARGUMENTS, "type", "id")}
    arguments = object_of(given)
    return (name, arguments) if isinstance(name, str) and name and arguments is not None else None


def arguments_in(text: str) -> str:
    """Returns arguments that are not written as an object, as JSON."""
    try:
        arguments = object_of(parse_written(text))
    except ValueError:
        arguments = None
    return json.dumps(arguments or {}, ensure_ascii=False)
