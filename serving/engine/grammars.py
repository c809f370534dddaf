"""Compiled grammars: each is tried in a process that can be stopped before this one compiles it.

A schema of forty characters can take minutes and all memory to compile (`multipleOf` of a large number), and the
library ends the process where there is no more. So a grammar that nobody has asked for before is compiled twice: what
its trial survives does the same here.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import subprocess
import sys
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

_TRIALS = 2
"""Processes that try grammars, at most."""
_MEMORY = 256 << 20
"""Bytes that compiling one grammar may take."""
_KEPT, _KEPT_BYTES = 128, 256 << 20
"""Compiled grammars that are kept for the next request that asks for the same."""
_REFUSED = 1024
"""Grammars that are remembered as refused."""
_PATIENCE = 30.0
"""Seconds that a grammar waits for a process to try it."""


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
        self._trials = _Trials(self._settings, seconds)

    def start(self, outputs: StructuredOutputs) -> Constraint:
        """A constraint at the beginning of an output. Takes a while for a grammar that has not been seen before.

        Raises:
            RequestError: as `compile` does.
        """
        matcher = self.compile(outputs).matcher
        return Constraint(matcher, mask_words(self._vocab_size), frozenset(self._eos))

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of an output's form.

        Raises:
            RequestError: it is broken, or takes too much to compile; or, to be tried again, too many others are being
                compiled.
        """
        key = outputs.key()
        with self._lock:
            known = self._held.get(key)
            if known is not None:
                self._keep(key, known)
                return known
            if key in self._refused:
                self._refused.move_to_end(key)
                raise RequestError(self._refused[key])
            pending = self._pending.get(key)
            if pending is None:
                mine = self._pending[key] = Future()
        if pending is not None:
            return pending.result()
        try:
            found = self._compile(key)
        except BaseException as error:
            with self._lock:
                del self._pending[key]
                if isinstance(error, RequestError) and not error.retry:
                    self._refused[key] = str(error)
                    if len(self._refused) > _REFUSED:
                        self._refused.popitem(last=False)
            mine.set_exception(error)
            raise
        with self._lock:
            del self._pending[key]
            self._keep(key, found)
        mine.set_result(found)
        return found

    def _keep(self, key: str, grammar: Grammar) -> None:
        self._held[key] = self._kept[key] = grammar
        self._kept.move_to_end(key)
        total = sum(each.num_bytes for each in self._kept.values())
        while len(self._kept) > _KEPT or (total > _KEPT_BYTES and len(self._kept) > 1):
            total -= self._kept.popitem(last=False)[1].num_bytes

    def _compile(self, key: str) -> Grammar:
        tried = self._trials.run(key)
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


class _Trials:
    """Up to a few processes, started when they are needed, ended when one takes too long or with this object."""

    def __init__(self, settings: Any, seconds: float) -> None:
        self._settings, self._seconds = settings, seconds
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(_TRIALS):
            self._free.put(None)  # may be started
        self._running: set[subprocess.Popen[bytes]] = set()
        weakref.finalize(self, _stop_all, self._running)

    def run(self, key: str) -> dict[str, Any]:
        """What became of a grammar: its form and size, or an error.

        Raises:
            RequestError: no process became free, or could be started.
        """
        try:
            process = self._free.get(timeout=_PATIENCE)
        except queue.Empty:
            raise RequestError("too many grammars are being compiled: try again later", retry=True) from None
        try:
            if process is not None and process.poll() is not None:  # ended by somebody else
                self._running.discard(process)
                process = None
            process = process or self._start()
            answer = self._ask(process, key)
        except BaseException:
            if process is not None:
                self._end(process)
            self._free.put(None)
            raise
        if answer is not None:
            self._free.put(process)
            return answer
        self._end(process)
        self._free.put(None)
        if process.returncode in (-24, -9):  # SIGXCPU, or ours
            return {"error": f"the grammar takes more than {self._seconds:g} seconds to compile"}
        return {"error": f"the grammar takes more than {_MEMORY >> 20} MiB to compile"}

    def _start(self) -> subprocess.Popen[bytes]:
        # By path, and without the folder on the module path: its files have names of the standard library.
        process = subprocess.Popen(
            [sys.executable, "-P", grammar_trial.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._running.add(process)
        self._write(process, self._settings() | {"memory": _MEMORY, "seconds": self._seconds})
        assert process.stdout is not None
        greeting = grammar_trial.read_frame(process.stdout)  # type: ignore[arg-type]
        if greeting is None or "error" in greeting:
            self._end(process)
            why = "the process that tries grammars has ended" if greeting is None else greeting["error"]
            raise RequestError(f"structured outputs: {why}", retry=greeting is None)
        return process

    def _ask(self, process: subprocess.Popen[bytes], key: str) -> dict[str, Any] | None:
        """The process's answer; None if it has ended, or had to be."""
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._write(process, json.loads(key))
        # Its own limit is processor time; on a machine with too much to do that takes longer.
        if not select.select([process.stdout], [], [], 3 * self._seconds + 5)[0]:
            process.kill()
        found: dict[str, Any] | None = grammar_trial.read_frame(process.stdout)  # type: ignore[arg-type]
        return found

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._running.discard(process)
        _stop(process)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        grammar_trial.write_frame(process.stdin, value)  # type: ignore[arg-type]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def _stop_all(processes: set[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _stop(process)
