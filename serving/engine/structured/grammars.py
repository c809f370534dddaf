"""Structured outputs: the forms, their compiled grammars, and a choice's position in its grammar."""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any

import llguidance
import numpy as np
from pydantic import BeforeValidator, PlainValidator, StrictBool, StrictStr
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from checkpoints.errors import one_line
from checkpoints.tokenizer import Tokenizer
from mamba_jax.sampling.masks import mask_words
from serving.core.errors import RequestError
from serving.engine.fair_lru import FairLru
from serving.engine.structured import grammar_trial
from serving.engine.structured.trials import GrammarTrials
from serving.settings import checks_names, listed

_NEAREST = {
    "disable_additional_properties": "give the schema additionalProperties: false",
    "disable_any_whitespace": "use grammar or regex for JSON without white space",
    "disable_fallback": "there is one implementation, without a fallback",
    "structural_tag": "use grammar, or response_format of the server",
    "whitespace_pattern": "use grammar or regex for JSON with other white space",
}
"""vLLM's fields that are not supported, and the nearest way."""


def _schema(value: Any) -> Any:
    if not isinstance(value, (str, Mapping, bool, NoneType)):
        raise PydanticCustomError("kind", "must be a schema: an object, its text, true or false")
    return value


@checks_names("field of structured outputs", _NEAREST, lambda _, value: not value, "structured outputs: ")
@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an output, with vLLM's names. Exactly one field must be set.

    Raises:
        RequestError: no field or several fields are set, a name is unknown, or a value has the wrong type.
    """

    json: Annotated[str | Mapping[str, Any] | bool | None, BeforeValidator(_schema)] = None
    """A JSON schema."""
    regex: StrictStr | None = None
    choice: Annotated[Sequence[str], PlainValidator(listed(str, "texts", filled=True))] | None = None
    """The output is one of these texts."""
    grammar: StrictStr | None = None
    """A context-free grammar in Lark's syntax, or in GBNF."""
    json_object: StrictBool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        given = [getattr(self, f.name) for f in fields(self)]
        # `json=False` is a valid schema, but `json_object=False` counts as not set.
        given = [value for value in given[:-1] if value is not None] + [value for value in given[-1:] if value]
        if len(given) != 1:
            raise RequestError("structured outputs: exactly one of json, regex, choice, grammar and json_object")

    @functools.cached_property
    def key(self) -> str:
        """The kind and value as JSON; equal keys mean equal forms.

        Raises:
            RequestError: the schema is not JSON, or the value is too long.
        """
        kinds = (kind for kind in ("regex", "choice", "grammar") if getattr(self, kind) is not None)
        kind = next(kinds, "json")
        value: Any = {"type": "object"} if self.json_object else getattr(self, kind)
        try:
            text = json.dumps([kind, json.loads(value) if kind == "json" and isinstance(value, str) else value])
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured outputs: the schema is not JSON: {one_line(error)}") from None
        if len(text) > grammar_trial.LONGEST:
            raise RequestError(f"structured outputs: the {kind} is longer than {grammar_trial.LONGEST:,} characters")
        return text


StructuredOutputsParams = StructuredOutputs
"""The same by vLLM's name."""


class Constraint:
    """One choice's position in its grammar.

    The choice runs in lockstep: before its next step is dispatched, the host advances the grammar by all its tokens and
    by the drafts that the device will verify. Every verified position has its own mask, so the device rejects a draft
    that the grammar does not allow like any other wrong draft.
    """

    def __init__(self, start: llguidance.LLMatcher, words: int, eos_token_ids: frozenset[int]) -> None:
        """`start`: a matcher at the grammar's beginning. Choices share it, so it is never advanced."""
        self._start, self._matcher = start, start.deep_copy()
        self._words, self._eos = words, eos_token_ids
        self._followed: list[int] = []
        """The output's tokens so far."""
        self._ended_early = False

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further token."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed further, for example because it became too complex; None if it can."""
        if self._ended_early:
            return "the output ends where the grammar wants more"
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def advance(self, tokens: Sequence[int]) -> int:
        """Processes new tokens. Returns how many of them belong to the output; the others are after the grammar's
        end."""
        for count, token in enumerate(tokens):
            if self._matcher.is_stopped():
                return count
            if token in self._eos:
                self._ended_early = not self._matcher.is_accepting()
                return count + 1
            if not self._matcher.consume_token(token):
                return count  # `error` has the reason
            self._followed.append(token)
        return len(tokens)

    def masks(self, drafts: Sequence[int], heads: int) -> np.ndarray:
        """Returns the tokens allowed at each head, uint32 [heads, words]: after all tokens so far and after each draft.

        The step ignores the heads after the first forbidden draft, so their masks allow all tokens.
        """
        masks = np.full((heads, self._words), 0xFFFFFFFF, np.uint32)
        masks[0] = self._mask()
        if self._matcher.is_error():
            return masks  # `error` has the reason after the next token
        followed = 0
        for head, draft in enumerate(drafts[: heads - 1], start=1):
            allowed = draft >= 0 and masks[head - 1, draft // 32] >> np.uint32(draft % 32) & 1
            if not allowed or draft in self._eos or self._matcher.is_stopped():
                break
            if not self._matcher.consume_token(draft):
                break
            followed += 1
            mask = self._mask()
            if self._matcher.is_error():
                break
            masks[head] = mask
        if self._matcher.is_error():
            # A matcher that fails on a draft stays failed, but the output is still valid: another one follows it.
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._followed)
        elif followed:
            self._matcher.rollback(followed)
        return masks

    def _mask(self) -> np.ndarray:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]


_KEPT, _KEPT_BYTES = 128, 256 << 20
"""Maximum number of cached compiled grammars, and maximum bytes of all of them."""
_REFUSED = 1024
"""Maximum number of refused grammars to remember."""


class Grammar:
    """A compiled grammar. It stays in memory while there are references to it."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self.matcher, self.num_bytes = matcher, num_bytes


class Grammars:
    """Compiles grammars for one tokenizer and caches them. Several threads may use it.

    Each new grammar is first compiled on trial in another process, which can be killed: a schema of forty characters
    can take minutes and all memory (`multipleOf` of a large number), and then the library ends the process.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary size, which may be larger than the tokenizer's.
        eos_token_ids: tokens that are allowed where the grammar may end.
        seconds: maximum processor time for compiling one grammar.
        users: number of engines that use them, each of which calls `close`.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], *, seconds: float = 10.0,
        users: int = 1,
    ) -> None:  # fmt: skip
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept = FairLru[Grammar](_KEPT, _KEPT_BYTES)
        self._held: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._refused = FairLru[str](_REFUSED)
        self._pending: dict[str, Future[Grammar]] = {}
        self._trials, self._users = GrammarTrials(self._settings, seconds), users

    def start(self, outputs: StructuredOutputs) -> Constraint:
        """Returns a constraint at the beginning of an output. Waits for the trial of a new grammar.

        Raises:
            RequestError: see `submit`.
        """
        matcher = self.submit(outputs).result().matcher
        return Constraint(matcher, mask_words(self.vocab_size), frozenset(self.eos_token_ids))

    def submit(self, outputs: StructuredOutputs, client: str | None = None) -> Future[Grammar]:
        """Compiles a grammar, without waiting for its trial; a cached grammar is available immediately. The trial
        counts for `client`.

        Raises:
            RequestError: the grammar was refused before; or, with `retry`, too many other compilations are pending.
                The future also raises it, for a grammar that is invalid or too expensive to compile.
        """
        key = outputs.key
        with self._lock:
            known = self._held.get(key)
            if known is not None:
                if self._kept.get(key) is None:
                    self._kept.put(key, known, client, known.num_bytes)
                found: Future[Grammar] = Future()
                found.set_result(known)
                return found
            if (reason := self._refused.get(key)) is not None:
                raise RequestError(reason)
            if key in self._pending:
                return self._pending[key]
            tried = self._trials.submit(key, client)
            pending = self._pending[key] = Future()
        # The callback runs in the trial's thread, or in this thread if the trial has already ended.
        tried.add_done_callback(lambda tried: self._take(key, client, tried, pending))
        return pending

    def _take(self, key: str, client: str | None, tried: Future[dict[str, Any]], pending: Future[Grammar]) -> None:
        try:
            found = self._compile(tried.result())
        except BaseException as error:
            with self._lock:
                del self._pending[key]
                if isinstance(error, RequestError) and not error.retry:
                    self._refused.put(key, str(error), client)
            pending.set_exception(error)
            return
        with self._lock:
            del self._pending[key]
            self._held[key] = found
            self._kept.put(key, found, client, found.num_bytes)
        pending.set_result(found)

    def close(self) -> None:
        """Ends all trials if no other engine uses these grammars. No more can then be compiled."""
        with self._lock:
            self._users -= 1
        if not self._users:
            self._trials.close()

    def _compile(self, tried: dict[str, Any]) -> Grammar:
        if "error" in tried:
            raise RequestError(f"structured outputs: {tried['error']}")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                # Create the vocabulary when it is first needed, because a large one takes about a second.
                self._vocabulary = grammar_trial.vocabulary_of(self._settings())
        return Grammar(grammar_trial.compiled(self._vocabulary, tried["form"]), tried["bytes"])

    def _settings(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer.to_json(),
            "vocab_size": self.vocab_size,
            "eos_token_ids": list(self.eos_token_ids),
        }
