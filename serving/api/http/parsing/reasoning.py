"""Reasoning that a model writes before its answer, between the marks of its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkpoints.tokenizer import Tokenizer
from serving.api.http.parsing.call_pieces import may_begin

_TAIL = 32
"""Number of tokens at a prompt's end in which to look for its last mark."""
_FIRST = 4
"""Number of first output tokens in which to look for the begin mark; white space may precede it."""


class ReasoningMarks(NamedTuple):
    """Text before and after reasoning."""

    begin: str
    end: str


THINK = ReasoningMarks("<think>", "</think>")


def reasoning_marks(tokenizer: Tokenizer | None) -> ReasoningMarks | None:
    """Returns the marks around reasoning if the chat template contains one of them; otherwise None.

    Some templates only start reasoning (OLMo 3), or only remove it from earlier turns (LFM2.5).
    """
    if tokenizer is None or not any(tokenizer.chat_template_mentions(mark) for mark in THINK):
        return None
    return THINK


class ReasoningStart(NamedTuple):
    """The state of reasoning at the end of a prompt."""

    begun: bool
    """The prompt ends within reasoning."""
    ended: bool
    """The prompt ends with the end mark of reasoning: reasoning is disabled."""


def opening_of(tokenizer: Tokenizer, prompt: list[int], marks: ReasoningMarks) -> ReasoningStart:
    """Returns the state of reasoning after a conversation's last tokens."""
    text = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    return ReasoningStart(text.endswith(marks.begin), text.endswith(marks.end))


@dataclass(frozen=True)
class ReasoningCount:
    """Counts reasoning tokens, including the marks, if each mark is one token."""

    begin: int
    end: int
    begun: bool
    until: int | None = None
    """A token that also ends reasoning, and belongs to the answer."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, marks: ReasoningMarks, *, begun: bool, until: str | None = None
    ) -> ReasoningCount | None:
        """Returns a counter, or None if a mark is not one token. `until`: see `ReasoningReader`."""
        begin, end = (tokenizer.token_to_id(mark) for mark in marks)
        if begin is None or end is None:
            return None
        return cls(begin, end, begun, None if until is None else tokenizer.token_to_id(until))

    def __call__(self, token_ids: list[int]) -> int:
        """Returns the number of a choice's tokens that belong to its reasoning."""
        if not self.begun and self.begin not in token_ids[:_FIRST]:
            return 0
        ends = [token_ids.index(token) + (token == self.end) for token in (self.end, self.until) if token in token_ids]
        return min(ends, default=len(token_ids))


class ReasoningReader:
    """Splits one choice's text into reasoning and answer, as it arrives.

    Args:
        marks: the marks around reasoning.
        begun: the text starts within reasoning. Otherwise it starts with the mark, or there is no reasoning.
        until: a text that also ends reasoning, and belongs to the answer; None for none.
    """

    def __init__(self, marks: ReasoningMarks, *, begun: bool, until: str | None = None) -> None:
        self._marks = marks
        self._ends = (marks.end,) if until is None else (marks.end, until)
        self._text = ""
        """Text that has not been returned."""
        self._undecided, self._inside = not begun, begun
        self._returned = False
        """The reader has returned text since the last mark."""

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._inside

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Reads new text. `last`: the text ends here. Returns new reasoning, and new text of the answer.

        Strips white space around the reasoning, and at the answer's beginning if there was reasoning.
        """
        self._text += text
        if self._undecided:
            begun = self._text.lstrip()
            if begun.startswith(self._marks.begin):
                self._undecided, self._inside, self._text = False, True, begun[len(self._marks.begin) :]
            elif last or not self._marks.begin.startswith(begun):
                self._undecided, self._returned = False, True
            else:
                return "", ""
        if not self._inside:
            return "", self._answer()
        ends = [at for mark in self._ends if (at := self._text.find(mark)) >= 0]
        if ends:
            at = min(ends)
            reasoning, after = self._text[:at], self._text[at:].removeprefix(self._marks.end)
            shown = reasoning.rstrip() if self._returned else reasoning.strip()
            self._inside, self._returned, self._text = False, False, after
            return shown, self._answer()
        reasoning = self._text
        held = 0 if last else may_begin(reasoning, *self._ends)
        shown = reasoning[: len(reasoning) - held].rstrip()
        self._text = "" if last else self._text[len(shown) :]
        if not self._returned:
            shown = shown.lstrip()
        self._returned = self._returned or bool(shown)
        return shown, ""

    def _answer(self) -> str:
        shown, self._text = self._text if self._returned else self._text.lstrip(), ""
        self._returned = self._returned or bool(shown)
        return shown
