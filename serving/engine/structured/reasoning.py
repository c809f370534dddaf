"""Reasoning at the beginning of an output: it ends at a mark or with its budget; then the answer's form applies.

This module handles only requests with a form for the answer or a budget for the reasoning. For other requests, the
server finds the reasoning in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Annotated

import numpy as np
from pydantic import Field, StrictBool, StrictStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

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
        grammars: those of the model. Their tokens that end a text are forbidden within reasoning if the answer has a
            form.
    """

    def __init__(self, reasoning: Reasoning, answer: Constraint | None, grammars: Grammars) -> None:
        self._reasoning, self._answer, self._tokenizer = reasoning, answer, grammars.tokenizer
        self._words = mask_words(grammars.vocab_size)
        self._begin = tuple(self._tokenizer.encode(reasoning.begin, add_special_tokens=False))
        self._end = tuple(self._tokenizer.encode(reasoning.end, add_special_tokens=False))
        self._free = np.full(self._words, _ALL)
        if answer is not None:
            for token in grammars.eos_token_ids:
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
    form: StructuredOutputs | None, reasoning: Reasoning | None, grammars: Grammars | None
) -> Constraint | ReasoningConstraint | None:
    """Returns the constraint of one choice: a form, a budget for its reasoning, or both; None for neither.

    Raises:
        RequestError: there are no grammars: the model has no tokenizer, or they are disabled.
    """
    if form is None and (reasoning is None or reasoning.budget is None):
        return None
    if grammars is None:
        what = "structured outputs need" if form is not None else "reasoning: a budget needs"
        raise RequestError(f"{what} a tokenizer, and the flag enable_structured_outputs")
    answer = None if form is None else grammars.start(form)
    return answer if reasoning is None else ReasoningConstraint(reasoning, answer, grammars)
