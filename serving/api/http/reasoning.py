"""Reasoning that a model writes before its answer, between the marks that its chat template has taught it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkpoints.tokenizer import Tokenizer
from serving.api.http.call_pieces import may_begin

_TAIL = 32
"""Tokens of a prompt's end in which its last mark is looked for."""
_FIRST = 4
"""Tokens of an output among which reasoning begins, if it does: space may come before its mark."""


class ReasoningMarks(NamedTuple):
    """What stands before and after reasoning."""

    begin: str
    end: str


THINK = ReasoningMarks("<think>", "</think>")


def marks_of(tokenizer: Tokenizer | None) -> ReasoningMarks | None:
    """The marks around reasoning where the chat template contains one of them; None where it contains neither.

    Templates may only open reasoning (OLMo 3), or only remove it from earlier turns (LFM2.5).
    """
    if tokenizer is None or not any(tokenizer.chat_template_mentions(mark) for mark in THINK):
        return None
    return THINK


class Opening(NamedTuple):
    """What a prompt says about the reasoning of its answer."""

    begun: bool
    """The prompt ends within reasoning."""
    ended: bool
    """The prompt ends with reasoning that is over already: thinking is switched off."""


def opening_of(tokenizer: Tokenizer, prompt: list[int], marks: ReasoningMarks) -> Opening:
    """How a conversation's last tokens open its answer."""
    text = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    return Opening(text.endswith(marks.begin), text.endswith(marks.end))


@dataclass(frozen=True)
class ReasoningCount:
    """Counts the tokens of reasoning, its marks included, where these are tokens of their own."""

    begin: int
    end: int
    begun: bool
    until: int | None = None
    """A token that ends reasoning, too, and belongs to the answer."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, marks: ReasoningMarks, *, begun: bool, until: str | None = None
    ) -> ReasoningCount | None:
        """None where a mark is not one token. `until` as for `ReasoningReader`."""
        begin, end = (tokenizer.token_to_id(mark) for mark in marks)
        if begin is None or end is None:
            return None
        return cls(begin, end, begun, None if until is None else tokenizer.token_to_id(until))

    def __call__(self, token_ids: list[int]) -> int:
        """How many of a choice's tokens belong to its reasoning."""
        if not self.begun and self.begin not in token_ids[:_FIRST]:
            return 0
        ends = [token_ids.index(token) + (token == self.end) for token in (self.end, self.until) if token in token_ids]
        return min(ends, default=len(token_ids))


class ReasoningReader:
    """Takes one choice's text as it comes; tells which of it is reasoning, and which the answer.

    Args:
        marks: around reasoning.
        begun: the text begins within reasoning. Otherwise it begins with the mark, or there is no reasoning.
        until: a text that ends reasoning, too, and belongs to the answer; None for none.
    """

    def __init__(self, marks: ReasoningMarks, *, begun: bool, until: str | None = None) -> None:
        self._marks = marks
        self._ends = (marks.end,) if until is None else (marks.end, until)
        self._text = ""
        """Not told yet."""
        self._undecided, self._inside = not begun, begun
        self._said = False
        """Something has come out since the last mark."""

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._inside

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """New text; `last` says that no more comes. Returns what is new of the reasoning, and of the answer.

        Space at either end of the reasoning is left out, and at the answer's beginning, if there was reasoning.
        """
        self._text += text
        if self._undecided:
            begun = self._text.lstrip()
            if begun.startswith(self._marks.begin):
                self._undecided, self._inside, self._text = False, True, begun[len(self._marks.begin) :]
            elif last or not self._marks.begin.startswith(begun):
                self._undecided, self._said = False, True
            else:
                return "", ""
        if not self._inside:
            return "", self._answer()
        found = [at for mark in self._ends if (at := self._text.find(mark)) >= 0]
        if found:
            at = min(found)
            reasoning, after = self._text[:at], self._text[at:].removeprefix(self._marks.end)
            told = reasoning.rstrip() if self._said else reasoning.strip()
            self._inside, self._said, self._text = False, False, after
            return told, self._answer()
        reasoning = self._text
        held = 0 if last else may_begin(reasoning, *self._ends)
        told = reasoning[: len(reasoning) - held].rstrip()
        self._text = "" if last else self._text[len(told) :]
        if not self._said:
            told = told.lstrip()
        self._said = self._said or bool(told)
        return told, ""

    def _answer(self) -> str:
        told, self._text = self._text if self._said else self._text.lstrip(), ""
        self._said = self._said or bool(told)
        return told
