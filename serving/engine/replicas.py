"""Replicas of an engine, each in a thread: no replica waits for a step of another. Changes of weights and adapters."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from checkpoints.tensors.replacement import NewWeights, repeatable
from serving.core.errors import RequestError
from serving.engine.control import WeightsChecksum
from serving.engine.engine import Engine
from serving.engine.engine_thread import Deliver, EngineThread, Result
from serving.engine.replica_loads import Assignment, ReplicaLoads
from serving.engine.requests.adapters import AdapterTable, ReadAdapter, Reservation
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.engine.stats import merged_stats

CallAll = Callable[[Callable[[Engine], Any]], list[Any]]
"""Calls a function with each engine between two of its steps; see `Engine.call_all`."""


def common_checksum(found: Sequence[WeightsChecksum]) -> WeightsChecksum:
    """Returns the checksum that all replicas have.

    Raises:
        RequestError: their weights differ.
    """
    if len({each.checksum for each in found}) > 1:
        versions = ", ".join(each.weights_version for each in found)
        raise RequestError(f"replicas have different weights (versions {versions}): send all weights again")
    return found[0]


@dataclass(frozen=True)
class WeightsUpdate:
    """New weights and the engines that need them."""

    weights: NewWeights
    version: str | int | None
    """The requested version. For several replicas without a requested version, the next number."""
    partial: bool
    lacking: Collection[Engine]
    """The engines to update. Engines that already have this version, for example after an update that failed on others,
    are omitted. If all engines have it, all are included, and they refuse the version."""

    @classmethod
    def of(
        cls, engines: Sequence[Engine], given: NewWeights, *, version: str | int | None = None, partial: bool = False
    ) -> WeightsUpdate:
        """Creates an update. The next version follows the replica with the most updates, because a replica that failed
        an update has fewer."""
        if len(engines) == 1:
            return cls(given, version, partial, engines)
        weights = [engine.control.weights for engine in engines]
        name = str(1 + max(each.updates for each in weights)) if version is None else str(version)
        lacking = [e for e, each in zip(engines, weights, strict=True) if each.version != name or not each.whole]
        return cls(repeatable(given), name, partial, lacking or engines)

    def apply(self, engine: Engine) -> str:
        """Updates an engine between two of its steps if it needs the weights. Returns the engine's version.

        Raises:
            RequestError: see `Control.update_weights`.
        """
        if engine in self.lacking:
            return engine.control.update_weights(self.weights, version=self.version, partial=self.partial)
        return engine.control.weights.version


def table_of(engine: Engine) -> AdapterTable:
    """Returns the adapters of an engine.

    Raises:
        RequestError: the engine serves none.
    """
    if engine.adapters is None:
        raise RequestError("adapters need the flag enable_lora or max_initial_states")
    return engine.adapters


def load_adapter(name: str, path: str, adapter: ReadAdapter, call_all: CallAll) -> None:
    """Loads or reloads an adapter, which was read from its files, on all engines.

    Raises:
        RequestError: it cannot be loaded on one of them. All engines keep the adapters that they have.
    """
    reserved: dict[Engine, Reservation] = {}

    def reserve(engine: Engine) -> None:
        reserved[engine] = table_of(engine).reserve(name, path, adapter)

    def cancel(engine: Engine) -> None:
        if (reservation := reserved.pop(engine, None)) is not None:
            table_of(engine).cancel(reservation)

    def remove(engine: Engine) -> None:
        cancel(engine)
        table_of(engine).remove(name)

    undo = cancel
    try:
        call_all(reserve)
        undo = remove  # entries that a failed write has changed cannot be kept
        call_all(lambda engine: table_of(engine).commit(reserved.pop(engine)))
    except BaseException:
        call_all(undo)
        raise


_STEP_SECONDS = 0.05
"""Longest wait of a step of several replicas for their outputs."""


class Reader:
    """Receives the outputs of a request that was assigned to a replica."""

    def __init__(self, request: EngineRequest, assignment: Assignment) -> None:
        self.request, self.assignment = request, assignment


class ReplicaThreads:
    """An engine or several replicas, each in a thread.

    Args:
        engines: only this object may use them from now on.
        deliver: called on an engine's thread with the results of a step, each with the `Reader` of its request:
            deltas, finished outputs and errors.
    """

    def __init__(self, engines: Engine | Sequence[Engine], deliver: Deliver) -> None:
        self.engines = tuple(engines) if isinstance(engines, Sequence) else (engines,)
        """All engines, for properties that never change while they run. Use `calls` for others."""
        self._deliver = deliver
        names = ["engine"] if len(self.engines) == 1 else [f"engine {i}" for i in range(len(self.engines))]
        self.threads = [EngineThread(each, self._publish, name) for each, name in zip(self.engines, names, strict=True)]
        self.loads = ReplicaLoads(self.engines)

    def _publish(self, results: Sequence[tuple[Reader, Result]]) -> None:
        delivered: list[tuple[Reader, Result]] = []
        for reader, result in results:
            if isinstance(result, RequestOutput):
                if any(choice.token_ids for choice in result.outputs):
                    reader.assignment.computed()
                if not (result.finished or reader.request.live):
                    continue
            delivered.append((reader, result))
        if delivered:
            self._deliver(delivered)

    def with_tokens(self, request: EngineRequest) -> tuple[EngineRequest, list[int]]:
        """Returns a request whose prompt is tokenized, and its tokens, by which a replica is chosen. With one engine,
        returns the request as it is, and no tokens.

        Raises:
            RequestError: the prompt is not valid.
        """
        if len(self.engines) == 1:
            return request, []
        text, ids = self.engine.prompt_ids(request.prompt)
        return replace(request, prompt={"prompt": text, "prompt_token_ids": ids}), ids

    def calls(self, function: Callable[[Engine], Any]) -> list[Future[Any]]:
        """Calls a function with each engine between two of its steps; returns the future results, in order."""
        return [thread.call(function) for thread in self.threads]

    def results(self, function: Callable[[Engine], Any]) -> list[Any]:
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
        self._arrived: queue.SimpleQueue[Sequence[tuple[Reader, Result]]] = queue.SimpleQueue()
        self._readers: dict[str, Reader] = {}
        """Of the requests whose finished output `step` has not returned, by request id."""
        super().__init__(engines, self._arrived.put)

    @property
    def max_model_len(self) -> int:
        """Same as `Engine.max_model_len`; equal for all replicas."""
        return self.engine.max_model_len

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
                    reader = Reader(request, self.loads.give(ids, request, without=full))
                    replica = reader.assignment.replica
                    try:
                        if replica not in adders:
                            adders[replica] = stack.enter_context(self.threads[replica].at_rest())
                        adders[replica](request, reader)
                    except Exception as error:
                        reader.assignment.ended()
                        full.append(replica)
                        if not self.loads.tries_another(error, full):
                            raise
                    else:
                        self._readers[request.request_id] = reader

    def abort(self, request_id: str) -> None:
        """Ends a request, if it is unfinished; a later `step` returns its output so far."""
        if (reader := self._readers.get(request_id)) is not None:
            self.threads[reader.assignment.replica].abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Waits a moment for new outputs of any replica, if there are unfinished requests, and returns them.

        Raises:
            EngineStopped: a replica has failed.
        """
        results: list[tuple[Reader, Result]] = []
        if self._readers:
            with contextlib.suppress(queue.Empty):  # paused replicas return nothing, and the caller may resume them
                results += self._arrived.get(timeout=_STEP_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                results += self._arrived.get_nowait()
        outputs: list[RequestOutput] = []
        for reader, result in results:
            if isinstance(result, Exception) or result.finished:
                reader.assignment.ended()
                self._readers.pop(reader.request.request_id, None)
            if isinstance(result, Exception):
                raise result
            outputs.append(result)
        return outputs

    def call_all(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with each replica between two of its steps; returns the results in the replicas' order."""
        return self.results(function)

    def close(self) -> None:
        """Closes all replicas; see `Engine.close`."""
        self.shutdown()
