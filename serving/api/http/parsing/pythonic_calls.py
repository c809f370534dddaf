"""Calls in Python syntax: `name(key="text", other=[1, None])`, in a list or one per line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.api.http.parsing.call_pieces import CallHead, CallNumbering, CallParser, CallPiece
from serving.api.http.parsing.json_calls import JsonCalls
from serving.api.http.parsing.written_json import ESCAPE, ESCAPE_PART, read_literal, unescaped

_FUNCTION = CallHead("", " (", name=r"[A-Za-z_][\w.\-]{0,255}")
_KEY = CallHead("", " =", name=r"[\w.\-]{1,256}")
_BETWEEN = re.compile(r"[\s,;\[\]]*")
_WORD = re.compile(r"[\w.\-]+|.", re.DOTALL)
_PLAIN = re.compile(r"""[^\\"']+""")
_QUOTES = ('"""', "'''", '"', "'")
_AFTER = re.compile(r"\s{0,64}")
_PREFIXES = ("", "r", "b", "f", "u", "rb", "br", "rf", "fr")


class PythonicCalls(CallParser):
    """Parses these calls. It returns strings as they arrive, and other values when they are complete.

    A quote ends a string only where an argument or the call can end, because models forget to escape quotes. Arguments
    without a name get the names of the tool's parameters, in order. The parser also accepts calls in JSON.
    """

    def __init__(self, closing: str, numbering: CallNumbering, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(closing, numbering, parameters)
        self._quote, self._depth = "", 0
        """The closing quote of the current string, and the number of open brackets of the current value."""
        self._json = JsonCalls(closing, numbering)

    def _as_json(self) -> list[CallPiece]:
        pieces, self._text = self._json.push(self._text, last=self._last), ""
        self.began, self.over, self.rest = self._json.began, self._json.over, self._json.rest
        return pieces

    def _between(self) -> list[CallPiece]:
        at = 0
        while True:
            space = _BETWEEN.match(self._text, at)
            at = space.end() if space else at
            matched = _FUNCTION.match(self._text, at)
            if matched or self._may_follow(_FUNCTION, at):
                break
            if not self.began:
                if self._text[at] == "{":
                    self._read = self._as_json
                else:
                    self._end("")
                return []
            word = _WORD.match(self._text, at)
            at = word.end() if word else at + 1
        self._text = self._text[at:]
        if self._text.startswith(self._closing):
            self._end(self._text[len(self._closing) :])
        elif matched:
            self._text, self._read = self._text[matched.end() - at :], self._argument
            return self._begin_call(matched[1])
        return []

    def _argument(self) -> list[CallPiece]:
        """Reads the name of an argument, or the end of a call."""
        self._text = self._text.lstrip(" \t\r\n,")
        if self._text.startswith((")", self._closing)):
            self._text, self._read = self._text.removeprefix(")"), self._between
            return [self._numbering.more("}")]
        if matched := _KEY.match(self._text):
            name, self._text = matched[1], self._text[matched.end() :]
        elif not self._may_follow(_KEY, 0):
            unnamed = (name for name in self._schemas if name not in self._keys)
            name = next(unnamed, f"argument_{len(self._keys) + 1}")
        else:
            return []
        self._read = self._value
        return [self._numbering.more(self._key(name))]

    def _value(self) -> list[CallPiece]:
        """Reads the beginning of a value."""
        self._text = self._text.lstrip()
        quote = next((quote for quote in _QUOTES if self._text.startswith(quote)), "")
        if not self._text or (self._text in ('""', "''", '"', "'") and not self._last):
            return []  # this may be the beginning of a triple quote
        if not quote:
            self._read, self._seen, self._depth, self._quote = self._literal, 0, 0, ""
            return []
        self._text, self._read, self._quote = self._text[len(quote) :], self._string, quote
        return [self._numbering.more('"')]

    def _string(self) -> list[CallPiece]:
        """Reads a string."""
        text, at, shown, ended = self._text, 0, "", False
        while at < len(text) and not ended:
            if plain := _PLAIN.match(text, at):
                shown, at = shown + plain[0], plain.end()
            elif text[at] == "\\":
                escape = ESCAPE.match(text, at)
                if escape is None or (ESCAPE_PART.fullmatch(text, at) and not self._last):
                    break
                shown, at = shown + unescaped(escape), escape.end()
            else:
                ends = self._ends_string(at)
                if ends is None:
                    break
                size = len(self._quote) if ends else 1
                shown, at, ended = shown + ("" if ends else text[at]), at + size, ends
        self._text = text[at:]
        if ended:
            self._read = self._argument
        written = json.dumps(shown, ensure_ascii=False)[1:-1] + ('"' if ended else "")
        return [self._numbering.more(written)] if written else []

    def _ends_string(self, at: int) -> bool | None:
        """Returns whether the quote at `at` ends the string; None if more text is needed to decide."""
        if not self._text.startswith(self._quote, at):
            part = self._quote.startswith(self._text[at:])
            return None if part and not self._last else False
        space = _AFTER.match(self._text, at + len(self._quote))
        after = self._text[space.end() :] if space else ""
        if after.startswith((",", ")", self._closing)):
            return True
        if self._closing.startswith(after):  # also if `after` is empty
            return True if self._last else None
        return False

    def _literal(self) -> list[CallPiece]:
        """Reads a value that is not a plain string, up to a comma or parenthesis outside brackets and strings."""
        text, at, ended = self._text, self._seen, False
        while at < len(text):
            letter = text[at]
            if self._quote:
                if letter == "\\":
                    at += 1
                elif letter == self._quote:
                    self._quote = ""
            elif letter in "\"'":
                opens = self._depth > 0 or text[:at].lower() in _PREFIXES
                self._quote = letter if opens else ""
            elif letter in "([{":
                self._depth += 1
            elif letter in ")]}" and self._depth > 0:
                self._depth -= 1
            elif letter == ")" or (letter == "," and self._depth == 0):
                ended = True
                break
            elif letter == self._closing[0] and self._closing.startswith(text[at : at + len(self._closing)]):
                ended = text.startswith(self._closing, at)
                break
            at += 1
        if not ended:
            self._seen = at
            return []
        value = read_literal(text[:at], self._schemas.get(self._keys[-1]))
        self._text, self._seen, self._read = text[at:], 0, self._argument
        return [self._numbering.more(json.dumps(value, ensure_ascii=False))]

    def _may_follow(self, head: CallHead, at: int) -> bool:
        """Returns whether the text from `at` is the closing mark, or may become the closing mark or a head."""
        text = self._text
        part = self._closing.startswith(text[at : at + len(self._closing)])
        return part or (head.may_follow(text, at) and not self._last)
