"""Replicas of an engine, each in a thread: the load of each, and the interface of one engine.

A request goes to the replica with the least to compute before it can answer. The rule is the router's
(`serving.core.load_balancing`), but each prefix index is read directly. All replicas can fetch the same states from
host memory or disk; one with a state on its device is preferred to one that must fetch it. No replica waits for a step
of another.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from serving.core.cache.content import Chain, Scope
from serving.core.errors import RequestError
from serving.core.load_balancing import EVENNESS, Workload, price
from serving.engine.engine import Engine
from serving.engine.engine_thread import Deliver, EngineThread, Result
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest, read_prompt
from serving.engine.stats import merged_stats

FETCHING = EVENNESS
"""The cost of fetching a token, as a fraction of computing it. With a smaller value, the replicas would fetch a single
conversation in turn, because load beyond a replica's share has this weight."""


class ReplicaLoads:
    """Tracks the load of each replica. Any thread may use it.

    Args:
        engines: the replicas.
        clock: returns seconds.
    """

    def __init__(self, engines: Sequence[Engine], clock: Callable[[], float] = time.monotonic) -> None:
        self._engines, self._clock = engines, clock
        self._work = [Workload() for _ in engines]
        self._choices = [0] * len(engines)
        self._lock = threading.Lock()

    def give(
        self,
        tokens: Sequence[int],
        request: EngineRequest,
        *,
        without: Collection[int] = (),
    ) -> Assignment:
        """Chooses a replica for a request with all its choices, and adds the request to the replica's load.

        A held replica (for example asleep, or without weights) is chosen only if all are held.

        Args:
            tokens: the prompt's token ids; ignored with one engine.
            request: the request. With `prompt_logprobs`, the whole prompt is computed. No states of an adapter that was
                never loaded are cached.
            without: replicas that must not be chosen.
        """
        reuses = len(self._engines) > 1 and request.params.prompt_logprobs is None
        choices, salt, adapter = request.params.n, request.cache_salt, None
        if request.lora_request is not None and (table := self._engines[0].adapters) is not None:
            adapter = table.names.digest(request.lora_request)
            reuses = reuses and adapter is not None
        # Look up states outside the lock, because looking up a long prompt takes time.
        chains: dict[Scope, Chain] = {}
        found = [
            engine.loop.scheduler.reusable(tokens, salt, adapter, chains) if reuses else (0, 0)
            for engine in self._engines
        ]
        missing = [len(tokens) - anywhere for _, anywhere in found]
        with self._lock:
            now = self._clock()
            recent = [work.recent(now) for work in self._work]
            share = sum(recent) / len(recent)

            def cost(replica: int) -> tuple[bool, float, int]:
                device, anywhere = found[replica]
                whole = price(
                    missing[replica] + FETCHING * (anywhere - device),
                    pending=self._work[replica].pending,
                    requests=self._choices[replica],
                    recent=recent[replica],
                    share=share,
                )
                return self._engines[replica].control.held, whole, self._choices[replica]

            best = min((i for i in range(len(self._engines)) if i not in without), key=cost)
            self._work[best].given(missing[best], now)
            self._choices[best] += choices
        return Assignment(self, request, best, missing[best])

    def tries_another(self, error: Exception, refused: Collection[int]) -> bool:
        """Returns whether to try another replica after the replicas `refused` refused a request, the last with `error`.

        A held replica is not tried, because it could delay the request indefinitely.
        """
        retry = isinstance(error, RequestError) and error.retry
        return retry and any(not each.control.held for i, each in enumerate(self._engines) if i not in refused)

    def computed(self, assignment: Assignment, *, choices: int = 0) -> None:
        """Records that a replica has computed the prompt of an assignment, or will not compute it, and that a number of
        its choices have ended."""
        with self._lock:  # two threads may call it
            self._work[assignment.replica].computed(assignment.missing)
            assignment.missing = 0
            self._choices[assignment.replica] -= choices


class Assignment:
    """The assignment of a request to a replica, until the request ends."""

    def __init__(self, loads: ReplicaLoads, request: EngineRequest, replica: int, missing: int) -> None:
        self._loads, self.request, self.replica, self.missing = loads, request, replica, missing

    def takes(self, output: RequestOutput) -> bool:
        """Records that the prompt is computed, if the output has tokens. Returns whether the request's reader gets this
        output: each one if the request is live, else only the finished one."""
        if self.missing and any(choice.token_ids for choice in output.outputs):
            self._loads.computed(self)
        return output.finished or self.request.live

    def ended(self) -> None:
        """Records that the request has ended. Must be called once."""
        self._loads.computed(self, choices=self.request.params.n)


_STEP_SECONDS = 0.05
"""Longest wait of a step of several replicas for their outputs."""


class ReplicaThreads:
    """An engine or several replicas, each in a thread.

    Args:
        engines: only this object may use them from now on.
        deliver: called on an engine's thread with the results of a step, each with the reader of its request: deltas,
            finished outputs and errors.
    """

    def __init__(self, engines: Engine | Sequence[Engine], deliver: Deliver) -> None:
        self.engines = tuple(engines) if isinstance(engines, Sequence) else (engines,)
        """All engines, for properties that never change while they run. Use `calls` for others."""
        names = ["engine"] if len(self.engines) == 1 else [f"engine {i}" for i in range(len(self.engines))]
        self.threads = [EngineThread(each, deliver, name) for each, name in zip(self.engines, names, strict=True)]
        self.loads = ReplicaLoads(self.engines)

    def with_tokens(self, request: EngineRequest) -> tuple[EngineRequest, list[int]]:
        """Returns a request whose prompt is tokenized, and its tokens, by which a replica is chosen. With one engine,
        returns the request as it is, and no tokens.

        Raises:
            RequestError: the prompt is not valid.
        """
        if len(self.engines) == 1:
            return request, []
        text, ids = read_prompt(request.prompt, self.engine.tokenizer, self.engine.vocab_size)
        return replace(request, prompt={"prompt": text, "prompt_token_ids": ids}), ids

    def calls(self, function: Callable[[Engine], Any]) -> list[Future[Any]]:
        """Calls a function with each engine between two of its steps; returns the future results, in order."""
        return [thread.call(function) for thread in self.threads]

    def call_each(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Returns the results of `calls`. If the function raises an error for one engine, the other engines still run
        it, and this method raises the error afterwards."""
        calls = self.calls(function)
        concurrent.futures.wait(calls)
        return [call.result() for call in calls]

    def tell(self, function: Callable[[Engine], Any]) -> None:
        """Calls a function like `calls`, without results. An engine that stops first does not run the function."""
        for thread in self.threads:
            thread.tell(function)

    @property
    def engine(self) -> Engine:
        """One of the engines, for properties that never change and are the same for all (tokenizer, limits)."""
        return self.engines[0]

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests on all engines."""
        return sum(engine.num_unfinished for engine in self.engines)

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began, for the engine with the longest step; 0 between steps."""
        return max(thread.step_seconds for thread in self.threads)

    @property
    def running(self) -> bool:
        """Whether all engines run: False after `shutdown` and after a permanent failure of one.

        The others may then finish their requests, but the process must be restarted.
        """
        return all(thread.running for thread in self.threads)

    @property
    def abandoned(self) -> bool:
        """Whether `shutdown` stopped waiting for a step. Its thread then ends only with the process."""
        return any(thread.abandoned for thread in self.threads)

    @property
    def latest_stats(self) -> dict[str, Any]:
        """Recent statistics, without waiting for an engine: `Engine.stats()`, for several engines `merged_stats`.

        They are at most a quarter of a second old, or as old as the current step if that takes longer.
        """
        stats = [thread.latest_stats for thread in self.threads]
        return stats[0] if len(stats) == 1 else merged_stats(stats)

    def shutdown(self, step_timeout: float | None = None) -> bool:
        """Stops the threads; unfinished requests end with `EngineStopped`.

        `step_timeout`: seconds to wait for running steps; None waits until they end. Returns False, and sets
        `abandoned`, if a step still runs after that time.
        """
        for thread in self.threads:
            thread.stop()  # all at once: no engine waits for another to compile or to write
        end = None if step_timeout is None else time.monotonic() + step_timeout
        for thread in self.threads:
            thread.shutdown(None if end is None else max(0.0, end - time.monotonic()))
        return not self.abandoned


class ReplicaGroup(ReplicaThreads):
    """Replicas for a caller without asyncio, with the methods of `Engine`. Not thread-safe: one caller uses it."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._arrived: queue.SimpleQueue[Sequence[tuple[Assignment, Result]]] = queue.SimpleQueue()
        self._readers: dict[str, Assignment] = {}
        """Of the requests whose finished output `step` has not returned, by request id."""
        super().__init__(engines, self._arrived.put)

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose finished output `step` has not returned yet."""
        return len(self._readers)

    def add(self, request: EngineRequest) -> None:
        """Adds a request to one of the replicas; see `Engine.add`. Its outputs come from `step` only."""
        self.add_all([request])

    def add_all(self, requests: Iterable[EngineRequest]) -> None:
        """Adds requests before a replica runs a step with some of them.

        Raises:
            RequestError: one of them cannot be served as asked. Those before it are added.
        """
        tokenized = [self.with_tokens(request) for request in requests]
        with contextlib.ExitStack() as stack:
            adders: dict[int, Callable[[EngineRequest, Any], None]] = {}
            for request, ids in tokenized:
                if request.request_id in self._readers:
                    raise RequestError(f"request id {request.request_id!r} is in use")
                full: list[int] = []
                while request.request_id not in self._readers:
                    reader = self.loads.give(ids, request, without=full)
                    replica = reader.replica
                    try:
                        if replica not in adders:
                            adders[replica] = stack.enter_context(self.threads[replica].at_rest())
                        adders[replica](request, reader)
                    except Exception as error:
                        reader.ended()
                        full.append(replica)
                        if not self.loads.tries_another(error, full):
                            raise
                    else:
                        self._readers[request.request_id] = reader

    def abort(self, request_id: str) -> None:
        """Ends a request, if it is unfinished; a later `step` returns its output so far."""
        if (reader := self._readers.get(request_id)) is not None:
            self.threads[reader.replica].abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Waits a moment for new outputs of any replica, if there are unfinished requests, and returns them.

        Raises:
            EngineStopped: a replica has failed.
        """
        results: list[tuple[Assignment, Result]] = []
        if self._readers:
            with contextlib.suppress(queue.Empty):  # paused replicas return nothing, and the caller may resume them
                results += self._arrived.get(timeout=_STEP_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                results += self._arrived.get_nowait()
        outputs: list[RequestOutput] = []
        for reader, result in results:
            if isinstance(result, Exception) or result.finished:
                reader.ended()
                self._readers.pop(reader.request.request_id, None)
            if isinstance(result, Exception):
                raise result
            outputs.append(result)
        return outputs

    def close(self) -> None:
        """Closes all replicas; see `Engine.close`."""
        self.shutdown()
