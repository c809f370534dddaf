"""Reasoning that a model writes before its answer, between the marks of its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkpoints.tokenizer import Tokenizer

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
        """Returns a counter, or None if a mark is not one token. `until`: a text that also ends reasoning,
        and belongs to the answer; None for none."""
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
