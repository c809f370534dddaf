"""Reasoning at the beginning of an output: it ends at a mark or with its budget; then the answer's form applies.

This module handles only requests with a form for the answer or a budget for the reasoning. For other requests, the
server finds the reasoning in the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Annotated

import numpy as np
from pydantic import Field, StrictBool, StrictStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from checkpoints.tokenizer import Tokenizer
from mamba_jax.sampling.masks import mask_words
from serving.core.errors import RequestError
from serving.engine.structured.grammars import Constraint, Grammars, StructuredOutputs
from serving.settings import Integer, checks_names

_ALL = np.uint32(0xFFFFFFFF)


@checks_names("field of reasoning", {}, lambda _, value: not value, "reasoning: ")
@pydantic_dataclass(frozen=True)
class Reasoning:
    """Declares that an output may begin with reasoning.

    Raises:
        RequestError: a value of the wrong kind.
    """

    begin: Annotated[StrictStr, Field(min_length=1)] = "<think>"
    end: Annotated[StrictStr, Field(min_length=1)] = "</think>"
    begun: StrictBool = False
    """The prompt ends within reasoning, and the output continues it."""
    budget: Annotated[Integer, Field(ge=0)] | None = None
    """Maximum number of reasoning tokens; then `end` is forced. None: no limit."""


class _Phase(Enum):
    UNDECIDED = auto()
    """Either the reasoning or the answer may begin."""
    REASONING = auto()
    ANSWER = auto()


@dataclass(frozen=True)
class _Place:
    """A position in an output."""

    phase: _Phase
    text: str = ""
    """The latest text: the whole output while undecided, otherwise the end that may contain part of the mark."""
    spent: int = 0
    """Tokens of reasoning."""
    forced: tuple[int, ...] = ()
    """The tokens that must come next: the rest of a mark."""


class ReasoningConstraint:
    """The constraint of a choice with reasoning and an answer; it has the interface of `Constraint`.

    Args:
        reasoning: declares the reasoning.
        answer: the form of the answer; None for any.
        tokenizer: the model's tokenizer.
        words: number of 32-bit words of a mask.
        eos_token_ids: forbidden within reasoning if the answer has a form.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        answer: Constraint | None,
        tokenizer: Tokenizer,
        words: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._reasoning, self._answer, self._tokenizer, self._words = reasoning, answer, tokenizer, words
        self._begin = tuple(tokenizer.encode(reasoning.begin, add_special_tokens=False))
        self._end = tuple(tokenizer.encode(reasoning.end, add_special_tokens=False))
        self._free = np.full(words, _ALL)
        if answer is not None:
            for token in eos_token_ids:
                self._free[token // 32] &= ~np.uint32(1 << token % 32)
        if reasoning.begun:
            self._place = self._reasoning_at(0)
        elif answer is None or len(self._begin) == 1:
            self._place = _Place(_Phase.UNDECIDED)
        else:  # the mark's first token may also begin the answer
            self._place = _Place(_Phase.ANSWER)

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self._answer is not None and self._place.phase is _Phase.ANSWER and self._answer.finished

    @property
    def error(self) -> str | None:
        """Why the answer's form cannot be followed further."""
        return None if self._answer is None else self._answer.error

    def advance(self, tokens: Sequence[int]) -> int:
        """Processes new tokens. Returns how many of them belong to the output."""
        for count, token in enumerate(tokens):
            if self._place.phase is _Phase.ANSWER:
                return count + (len(tokens) - count if self._answer is None else self._answer.advance(tokens[count:]))
            self._place, rest = self._followed(self._place, token)
            if self._place.phase is _Phase.ANSWER and self._answer is not None and rest:
                self._answer.advance(rest)
                if self._answer.error is not None:
                    return count + 1
        return len(tokens)

    def masks(self, drafts: Sequence[int], heads: int) -> np.ndarray:
        """Returns the tokens allowed at each head, uint32 [heads, words]; see `Constraint.masks`."""
        masks = np.full((heads, self._words), _ALL)
        place = self._place
        for head in range(heads):
            if self._answer is None and place.phase is _Phase.ANSWER:
                return masks  # the answer may have any form
            draft = drafts[head] if head < len(drafts) else -1
            if self._answer is not None and place.phase is not _Phase.REASONING:
                masks[head:] = self._answer.masks(drafts[head:], heads - head)
                if place.phase is _Phase.ANSWER or draft != self._begin[0]:
                    if place.phase is _Phase.UNDECIDED:
                        self._allow(masks[head], self._begin[0])
                    return masks
                self._allow(masks[head], draft)
                masks[head + 1 :] = _ALL
            else:
                masks[head] = self._mask(place)
            if draft < 0 or not masks[head][draft // 32] >> np.uint32(draft % 32) & 1:
                return masks
            place, rest = self._followed(place, draft)
            if rest and self._answer is not None:
                # The answer begins within this token, so the form processes the rest of the token's text first.
                known = self._answer.masks([*rest, *drafts[head + 1 :]], len(rest) + heads - head - 1)
                masks[head + 1 :] = known[len(rest) :]
                return masks
        return masks

    def _mask(self, place: _Place) -> np.ndarray:
        if not place.forced:
            return self._free
        mask = np.zeros(self._words, np.uint32)
        self._allow(mask, place.forced[0])
        return mask

    def _followed(self, place: _Place, token: int) -> tuple[_Place, tuple[int, ...]]:
        if place.forced:
            forced = place.forced[1:]
            return (replace(place, forced=forced) if forced else _Place(_Phase.ANSWER)), ()
        if place.phase is _Phase.UNDECIDED:
            return self._decided(place, token)
        text = place.text + self._tokenizer.token_text(token)
        _, mark, after = text.partition(self._reasoning.end)
        if mark:
            begun = after.strip()
            return _Place(_Phase.ANSWER), tuple(
                self._tokenizer.encode(begun, add_special_tokens=False)
            ) if begun else ()
        return self._reasoning_at(place.spent + 1, text[-len(self._reasoning.end) + 1 :]), ()

    def _decided(self, place: _Place, token: int) -> tuple[_Place, tuple[int, ...]]:
        if self._answer is not None:
            if token != self._begin[0]:
                return _Place(_Phase.ANSWER), (token,)
            return self._reasoning_at(0), ()
        text = (place.text + self._tokenizer.token_text(token)).lstrip()
        if text.startswith(self._reasoning.begin):
            return self._reasoning_at(0), ()
        undecided = self._reasoning.begin.startswith(text)
        return _Place(_Phase.UNDECIDED if undecided else _Phase.ANSWER, text), ()

    def _reasoning_at(self, spent: int, text: str = "") -> _Place:
        over = self._reasoning.budget is not None and spent >= self._reasoning.budget
        return _Place(_Phase.REASONING, text, spent, self._end if over else ())

    @staticmethod
    def _allow(mask: np.ndarray, token: int) -> None:
        mask[token // 32] |= np.uint32(1 << token % 32)


def constraint_of(
    form: StructuredOutputs | None,
    reasoning: Reasoning | None,
    grammars: Grammars | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: Iterable[int],
) -> Constraint | ReasoningConstraint | None:
    """Returns the constraint of one choice: a form, a budget for its reasoning, or both; None for neither.

    Raises:
        RequestError: the model has no tokenizer, or grammars are disabled.
    """
    if form is None and (reasoning is None or reasoning.budget is None):
        return None
    if grammars is None or tokenizer is None:
        what = "structured outputs need" if form is not None else "reasoning: a budget needs"
        raise RequestError(f"{what} a tokenizer, and the flag enable_structured_outputs")
    answer = None if form is None else grammars.start(form)
    if reasoning is None:
        return answer
    return ReasoningConstraint(reasoning, answer, tokenizer, mask_words(vocab_size), frozenset(eos_token_ids))
