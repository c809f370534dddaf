"""Compiles grammars, each first on trial in a separate process that can be killed.

A schema of forty characters can take minutes and all memory to compile (`multipleOf` of a large number), and the
library ends the process when memory runs out. Therefore each new grammar is compiled twice: first on trial in another
process, then in this one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import llguidance

from checkpoints.tokenizer import Tokenizer
from mamba_jax.sampling.masks import mask_words
from serving.engine.fair_lru import FairLru
from serving.engine.request_error import RequestError
from serving.engine.structured import grammar_trial
from serving.engine.structured.grammar_state import Constraint, StructuredOutputs
from serving.engine.structured.trials import GrammarTrials

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

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary size, which may be larger than the tokenizer's.
        eos_token_ids: tokens that are allowed where the grammar may end.
        seconds: maximum processor time for compiling one grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], *, seconds: float = 10.0
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept = FairLru[Grammar](_KEPT, _KEPT_BYTES)
        self._held: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._refused = FairLru[str](_REFUSED)
        self._pending: dict[str, Future[Grammar]] = {}
        self._trials = GrammarTrials(self._settings, seconds)

    def start(self, outputs: StructuredOutputs) -> Constraint:
        """Returns a constraint at the beginning of an output. Waits for the trial of a new grammar.

        Raises:
            RequestError: see `compile`.
        """
        matcher = self.compile(outputs).matcher
        return Constraint(matcher, mask_words(self._vocab_size), frozenset(self._eos))

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Returns the grammar of an output's form; waits for its trial.

        Raises:
            RequestError: the grammar is invalid or too expensive to compile; or, with `retry`, too many other
                compilations are pending.
        """
        return self.submit(outputs).result()

    def submit(self, outputs: StructuredOutputs, client: str | None = None) -> Future[Grammar]:
        """Compiles a grammar like `compile`, without waiting; a cached grammar is available immediately. The trial
        counts for `client`.

        The future raises the errors of `compile`.

        Raises:
            RequestError: the grammar was refused before, or too many other compilations are pending.
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
        """Ends all trials. No more grammars can be compiled."""
        self._trials.close()

    def _compile(self, tried: dict[str, Any]) -> Grammar:
        if "error" in tried:
            raise RequestError(f"structured outputs: {tried['error']}")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                # Create the vocabulary when it is first needed, because a large one takes about a second.
                given = self._settings()
                self._vocabulary = llguidance.LLTokenizer(
                    given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos_token_ids"]
                )
        return Grammar(grammar_trial.compiled(self._vocabulary, tried["form"]), tried["bytes"])

    def _settings(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer.to_json(), "vocab_size": self._vocab_size, "eos_token_ids": list(self._eos)
        }  # fmt: skip
