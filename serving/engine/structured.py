"""Outputs of a given form: a grammar follows each choice and says which tokens may come next.

A choice under a grammar runs in lockstep: before its next step is dispatched, the host has followed the grammar along
all its tokens, and along the drafts that the device will verify. Every verified position gets a mask of its own, so a
draft that the grammar does not allow is rejected like any other wrong one, and those before it count.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from checkpoints.tokenizer import Tokenizer
from mamba_jax.sampling.masks import mask_words
from serving.engine.sampling_params import RequestError

_KEPT = 128
"""Compiled grammars that are kept for the next request that asks for the same."""
_LONGEST = 1 << 20
_SPACE = r"( |\r?\n[ \t]{0,20})?"
"""Between the parts of a JSON text: nothing, a space, or a new line and indentation. With any space allowed, models may
write nothing else. A schema can say otherwise: `"x-guidance": {"whitespace_pattern": ...}`."""


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an output, with vLLM's names: exactly one of these.

    Raises:
        RequestError: none or several are given, or a value is of the wrong kind.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax, or in GBNF."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        given = [getattr(self, f.name) for f in fields(self)]
        # A schema of `false` is a schema; `json_object` of false is none.
        given = [value for value in given[:-1] if value is not None] + [value for value in given[-1:] if value]
        if len(given) != 1:
            raise RequestError("structured outputs: exactly one of json, regex, choice, grammar and json_object")
        if self.choice is not None and (
            isinstance(self.choice, str) or not self.choice or not all(isinstance(c, str) and c for c in self.choice)
        ):
            raise RequestError("structured outputs: choice must be a list of texts")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise RequestError(f"structured outputs: {name} must be a text")

    @classmethod
    def of(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """As it is, or made from a table such as `{"regex": "[0-9]+"}`.

        Raises:
            RequestError: it is neither, or does not fit.
        """
        if isinstance(value, cls):
            return value
        names = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise RequestError(f"structured outputs: a table with one of {', '.join(names)} is needed")
        return cls(**value)

    def compiled_form(self) -> str:
        """The grammar as llguidance takes it; equal forms give equal texts.

        Raises:
            RequestError: a schema that is not JSON, or a grammar in no known syntax.
        """
        matcher = llguidance.LLMatcher
        try:
            if self.regex is not None:
                form = matcher.grammar_from_regex(self.regex)
            elif self.choice is not None:
                form = matcher.grammar_from_lark(
                    "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
                )
            elif self.grammar is not None:
                form = matcher.grammar_from_lark(gbnf_to_lark(self.grammar) if "::=" in self.grammar else self.grammar)
            else:
                schema: Any = {"type": "object"} if self.json is None else self.json
                schema = json.loads(schema) if isinstance(schema, str) else schema
                # Only schemas that are tables take options.
                options: Any = {"whitespace_pattern": _SPACE} if isinstance(schema, dict) else None
                form = matcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
        except Exception as error:  # the package raises whatever its parsers do
            raise RequestError(f"structured outputs: {_one_line(error)}") from None
        if len(form) > _LONGEST:
            raise RequestError(f"structured outputs: the grammar is longer than {_LONGEST:,} characters")
        return form


class Grammars:
    """Compiles grammars for one tokenizer and keeps the latest. May be used by several threads.

    Args:
        tokenizer: the model's.
        vocab_size: the model's, which may be larger than the tokenizer's.
        eos_token_ids: what may come where the grammar allows an end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def start(self, outputs: StructuredOutputs) -> Constraint:
        """A constraint at the beginning of an output. Takes a moment for a grammar that has not been seen before.

        Raises:
            RequestError: the grammar is broken, or beyond what can be compiled.
        """
        form = outputs.compiled_form()
        with self._lock:
            matcher = self._kept.pop(form, None) or self._compile(form)
            self._kept[form] = matcher
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return Constraint(matcher.deep_copy(), mask_words(self._vocab_size), frozenset(self._eos))

    def _compile(self, form: str) -> llguidance.LLMatcher:
        if self._vocabulary is None:
            # A second or so for a large vocabulary, and only if anybody ever asks.
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=list(self._eos)
            )
        matcher = llguidance.LLMatcher(self._vocabulary, form, log_level=0)
        if matcher.is_error():
            raise RequestError(f"structured outputs: {_one_line(matcher.get_error())}")
        return matcher


class Constraint:
    """One choice's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._words, self._eos = matcher, words, eos_token_ids

    @property
    def finished(self) -> bool:
        """Whether nothing more may come."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further, where it became too complex on the way."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def advance(self, tokens: Sequence[int]) -> int:
        """Follow new tokens; returns how many of them belong to the output. The rest came after the grammar's end."""
        for count, token in enumerate(tokens):
            if self._matcher.is_stopped():
                return count
            if token in self._eos:
                return count + 1
            if not self._matcher.consume_token(token):
                return count  # `error` says why
        return len(tokens)

    def masks(self, drafts: Sequence[int], heads: int) -> np.ndarray:
        """What may come at each head, uint32 [heads, words]: after all tokens so far, and after each draft too.

        Heads after the first draft that is not allowed will not be looked at; they allow everything.
        """
        masks = np.full((heads, self._words), 0xFFFFFFFF, np.uint32)
        masks[0] = self._mask()
        followed = 0
        for head, draft in enumerate(drafts[: heads - 1], start=1):
            allowed = draft >= 0 and masks[head - 1, draft // 32] >> np.uint32(draft % 32) & 1
            if not allowed or draft in self._eos or self._matcher.is_stopped():
                break
            if not self._matcher.consume_token(draft):
                return masks
            followed += 1
            masks[head] = self._mask()
        if followed:
            self._matcher.rollback(followed)
        return masks

    def _mask(self) -> np.ndarray:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
