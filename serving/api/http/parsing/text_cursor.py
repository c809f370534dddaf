"""The position of a reader in a text that arrives in pieces.

A reader is a generator: it yields where it needs more text. What it returns does not depend on how the text is divided.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A reader that yields when it needs more text, and returns a value."""

SPACE = " \t\r\n\f\v"
_AHEAD = 4096
"""Maximum number of characters that a reader examines before it decides about a mark."""


class TextEnds(Exception):
    """The text has no more characters."""


class TextCursor:
    """The text that has not been consumed. Consuming all of a text takes time in proportion to its length."""

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.last = self.cut = False
        """No more text follows; the output limit cut the text off."""

    def push(self, text: str, *, last: bool, cut: bool) -> None:
        """Appends new text."""
        self.text, self.at, self.last, self.cut = self.text[self.at :] + text, 0, last, cut

    def more(self) -> Wait[None]:
        """Waits for more text. Raises `TextEnds` if there is none."""
        if self.last:
            raise TextEnds
        yield

    @contextlib.contextmanager
    def completing(self, end: Callable[[], object]) -> Iterator[None]:
        """Calls `end` where the text ends in the block, unless the output limit cut it off."""
        try:
            yield
        except TextEnds:
            if not self.cut:
                end()
            raise

    @contextlib.contextmanager
    def closing(self, end: Callable[[], object]) -> Iterator[None]:
        """Calls `end` after what is read in the block; also where the text ends, unless the output limit cut it off."""
        with self.completing(end):
            yield
        end()

    def take(self, count: int) -> str:
        """Consumes and returns characters."""
        begin, self.at = self.at, self.at + count
        return self.text[begin : self.at]

    def skip(self, letters: str, consume: Callable[[str], object] = len) -> Wait[None]:
        """Consumes these letters, until another letter is next."""
        while True:
            begin, size = self.at, len(self.text)
            while self.at < size and self.text[self.at] in letters:
                self.at += 1
            consume(self.text[begin : self.at])
            if self.at < size:
                return
            yield from self.more()

    def mark(self, *marks: str) -> Wait[str]:
        """Returns the mark that is next, or "" if there is none. The end of the text within a mark is the end."""
        while True:
            for mark in marks:
                if mark and self.text.startswith(mark, self.at):
                    return mark
            rest = self.text[self.at : self.at + max(map(len, marks))]
            if rest and not any(mark.startswith(rest) for mark in marks):
                return ""
            yield from self.more()

    def head(
        self, *heads: Head, skipped: int = 0, only: Callable[[str], bool] | None = None
    ) -> Wait[re.Match[str] | None]:
        """Returns the match of the first of the heads that is next after `skipped` characters, without consuming it;
        None if there is none. `only`: whether a name may begin with a text."""
        at = self.at + skipped
        for head in heads:
            while True:
                if matched := head.match(self.text, at):
                    if only is None or only(matched[1]):
                        return matched
                    break
                part = None if self.last else head.part(self.text, at)
                if part is None or (only is not None and not only(part[1] or "")):
                    break
                yield
                at = self.at + skipped
        return None

    def skip_fence(self, consume: Callable[[str], object] = len) -> Wait[bool]:
        """Consumes the beginning of a code fence around calls or arguments. Returns whether there is one."""
        if matched := (yield from self.head(_FENCE)):
            consume(self.take(len(matched[0])))
        return matched is not None

    def follows(self, marks: tuple[str, ...], skipped: int) -> Wait[tuple[str, int] | None]:
        """Returns which of the marks is next after `skipped` characters and white space, "" for the end of the text,
        and the distance of its end; None if there is none."""
        while True:
            begin = self.at + skipped
            rest = self.text[begin : begin + _AHEAD].lstrip()
            if mark := next((mark for mark in marks if rest.startswith(mark)), ""):
                return mark, self.text.index(mark, begin) + len(mark) - self.at
            part = any(mark.startswith(rest) for mark in marks)
            if not part or self.last or len(self.text) >= begin + _AHEAD:
                return ("", skipped) if part else None
            yield

    def until(self, marks: Marks, consume: Callable[[str], object] = len) -> Wait[str]:
        """Consumes text up to the first of the marks, and returns the mark. Raises `TextEnds` if there is none; the
        beginning of a mark at the end of the text is then not consumed."""
        while True:
            if found := marks.whole.search(self.text, self.at):
                consume(self.take(found.start() - self.at))
                return found[0]
            consume(self.take(len(self.text) - self.at - marks.beginning(self.text, self.at)))
            yield from self.more()

    def ahead(self, marks: Marks, skipped: int) -> Wait[tuple[str, int]]:
        """Returns the first of the marks in the next characters, and its distance, without consuming it; "" if there
        is none. `skipped`: characters to leave out first."""
        while True:
            begin = self.at + skipped
            if found := marks.whole.search(self.text, begin, begin + _AHEAD):
                return found[0], found.start() - self.at
            if self.last or len(self.text) >= begin + _AHEAD:
                return "", 0
            yield


class Marks:
    """Several marks to search for; none begins within another."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(mark for mark in marks if mark)
        self.whole = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self._longest = max(map(len, self._marks), default=1) - 1
        self._firsts = {mark[0] for mark in self._marks}

    def beginning(self, text: str, at: int) -> int:
        """Returns the length of the longest end of `text`, after `at`, that is the beginning of a mark."""
        for size in range(min(len(text) - at, self._longest), 0, -1):
            if text[-size] in self._firsts and any(
                len(mark) > size and mark.startswith(text[-size:]) for mark in self._marks
            ):
                return size
        return 0


cached_marks = functools.lru_cache(1024)(lambda *marks: Marks(marks))


class Head:
    """The beginning of a call or of a parameter: a name between the marks `before` and `after`, in which a space
    matches any white space, or none. Also recognizes incomplete heads.

    `name` is a regular expression that also matches any prefix of a name; `ahead` one for the text after the head.
    """

    def __init__(self, before: str, after: str, *, name: str = r"[^<>\n]{1,256}", ahead: str = "") -> None:
        self.before, self.after = before, after
        atoms = [*map(_atom, before), f"({name})", *map(_atom, after), *([ahead] if ahead else [])]
        self._whole = re.compile("".join(atoms))
        part = ""  # matches any number of atoms, starting with the first
        for atom in reversed(atoms):
            part = f"{atom}(?:{part})?" if part else atom
        self._part = re.compile(f"(?:{part})?")

    def write(self, name: str) -> str:
        """Returns the head with `name`, without optional white space."""
        return self.before.replace(" ", "") + name + self.after.replace(" ", "")

    def match(self, text: str, at: int) -> re.Match[str] | None:
        """Matches a head at `at`; the first group is the name."""
        return self._whole.match(text, at)

    def part(self, text: str, at: int) -> re.Match[str] | None:
        """Matches the text from `at` if it is the beginning of a head; the first group is the name so far."""
        return self._part.fullmatch(text, at)


def _atom(letter: str) -> str:
    return r"\s{0,16}" if letter == " " else re.escape(letter)


_FENCE = Head("```", " ", name="[A-Za-z]{0,16}", ahead=r"(?=[\[{<]|(?<=\s)\w)")
