"""Compiled grammars: each is tried in a process that can be stopped before this one compiles it.

A schema of forty characters can take minutes and all memory to compile (`multipleOf` of a large number), and the
library ends the process where there is no more. So a grammar that nobody has asked for before is compiled twice: what
its trial survives does the same here.
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
"""Compiled grammars that are kept for the next request that asks for the same."""
_REFUSED = 1024
"""Grammars that are remembered as refused."""


class Grammar:
    """A grammar that can be followed. It stays compiled for as long as somebody holds it."""

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int) -> None:
        self.matcher, self.num_bytes = matcher, num_bytes


class Grammars:
    """Compiles grammars for one tokenizer and keeps the latest. May be used by several threads.

    Args:
        tokenizer: the model's.
        vocab_size: the model's, which may be larger than the tokenizer's.
        eos_token_ids: what may come where the grammar allows an end.
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
        """A constraint at the beginning of an output. Takes a while for a grammar that has not been seen before.

        Raises:
            RequestError: as `compile` does.
        """
        matcher = self.compile(outputs).matcher
        return Constraint(matcher, mask_words(self._vocab_size), frozenset(self._eos))

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of an output's form; waits for its trial.

        Raises:
            RequestError: it is broken, or takes too much to compile; or, to be tried again, too many others are being
                compiled.
        """
        return self.submit(outputs).result()

    def submit(self, outputs: StructuredOutputs, client: str | None = None) -> Future[Grammar]:
        """As `compile`, without waiting: a grammar that is known is there at once. `client` is whose trial it is.

        The future raises what `compile` does.

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
                # A second or so for a large vocabulary, and only if anybody ever asks.
                given = self._settings()
                self._vocabulary = llguidance.LLTokenizer(
                    given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["eos_token_ids"]
                )
        return Grammar(grammar_trial.compiled(self._vocabulary, tried["form"]), tried["bytes"])

    def _settings(self) -> dict[str, Any]:
        return {
            "tokenizer": self._tokenizer.to_json(), "vocab_size": self._vocab_size, "eos_token_ids": list(self._eos)
        }  # fmt: skip
