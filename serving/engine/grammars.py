"""Compiled grammars: each is first compiled on trial, in a process that can be stopped.

A schema of forty characters can take minutes and all memory to compile (`multipleOf` of a large number), and the
library ends the process when memory runs out. Therefore a new grammar is compiled twice: first on trial in another
process, then here.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import llguidance

from checkpoints.tokenizer import Tokenizer
from mamba_jax.sampling.masks import mask_words
from serving.engine import grammar_trial
from serving.engine.request_error import RequestError
from serving.engine.structured import Constraint, StructuredOutputs
from serving.engine.trials import Trials

_KEPT, _KEPT_BYTES = 128, 256 << 20
"""Maximum number and size of compiled grammars that are cached."""
_REFUSED = 1024
"""Maximum number of grammars that are remembered as refused."""


class Grammar:
    """A compiled grammar. It stays in memory as long as it is referenced."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self.matcher, self.num_bytes = matcher, num_bytes


class Grammars:
    """Compiles grammars for one tokenizer and caches them. May be used by several threads.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, which may be larger than that of the tokenizer.
        eos_token_ids: tokens that are allowed where the grammar may end.
        seconds: processor time that compiling one grammar may take.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], *, seconds: float = 10.0
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._held: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._pending: dict[str, Future[Grammar]] = {}
        self._trials = Trials(self._settings, seconds)

    def start(self, outputs: StructuredOutputs) -> Constraint:
        """A constraint at the beginning of an output. Waits for the trial of a new grammar.

        Raises:
            RequestError: see `compile`.
        """
        matcher = self.compile(outputs).matcher
        return Constraint(matcher, mask_words(self._vocab_size), frozenset(self._eos))

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of an output's form; waits for its trial.

        Raises:
            RequestError: the grammar is invalid or too expensive to compile; or, with `retry`, too many others are
                being compiled.
        """
        return self.submit(outputs).result()

    def submit(self, outputs: StructuredOutputs, client: str | None = None) -> Future[Grammar]:
        """As `compile`, without waiting; a cached grammar is available at once. `client` is counted for the trial.

        The future raises the errors of `compile`.

        Raises:
            RequestError: the grammar was refused before, or too many others are being compiled.
        """
        key = outputs.key()
        with self._lock:
            known = self._held.get(key)
            if known is not None:
                self._keep(key, known)
                found: Future[Grammar] = Future()
                found.set_result(known)
                return found
            if key in self._refused:
                self._refused.move_to_end(key)
                raise RequestError(self._refused[key])
            if key in self._pending:
                return self._pending[key]
            tried = self._trials.submit(key, client)
            pending = self._pending[key] = Future()
        # In the thread of the trial, or here if that has ended already.
        tried.add_done_callback(lambda tried: self._take(key, tried, pending))
        return pending

    def _take(self, key: str, tried: Future[dict[str, Any]], pending: Future[Grammar]) -> None:
        try:
            found = self._compile(tried.result())
        except BaseException as error:
            with self._lock:
                del self._pending[key]
                if isinstance(error, RequestError) and not error.retry:
                    self._refused[key] = str(error)
                    if len(self._refused) > _REFUSED:
                        self._refused.popitem(last=False)
            pending.set_exception(error)
            return
        with self._lock:
            del self._pending[key]
            self._keep(key, found)
        pending.set_result(found)

    def close(self) -> None:
        """End all trials; nothing more will be compiled."""
        self._trials.close()

    def _keep(self, key: str, grammar: Grammar) -> None:
        self._held[key] = self._kept[key] = grammar
        self._kept.move_to_end(key)
        total = sum(each.num_bytes for each in self._kept.values())
        while len(self._kept) > _KEPT or (total > _KEPT_BYTES and len(self._kept) > 1):
            total -= self._kept.popitem(last=False)[1].num_bytes

    def _compile(self, tried: dict[str, Any]) -> Grammar:
        if "error" in tried:
            raise RequestError(f"structured outputs: {tried['error']}")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                # About a second for a large vocabulary, so only when it is first needed.
                given = self._settings()
                self._vocabulary = llguidance.LLTokenizer(
                    given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos_token_ids"]
                )
        return Grammar(grammar_trial.compiled(self._vocabulary, tried["form"]), tried["bytes"])

    def _settings(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer.to_json(), "vocab_size": self._vocab_size, "eos_token_ids": list(self._eos)
        }  # fmt: skip
