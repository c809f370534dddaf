"""Runs an engine or its replicas for concurrent callers and streams outputs to asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from checkpoints.replacement import NewWeights
from serving.engine.control import PauseMode
from serving.engine.engine import Engine
from serving.engine.engine_thread import EngineThread, Stream
from serving.engine.replicas.adapter_load import AdapterLoad, table_of
from serving.engine.replicas.group import EngineGroup
from serving.engine.replicas.replica_loads import ReplicaLoads
from serving.engine.replicas.replica_stats import merged
from serving.engine.replicas.update import Update
from serving.engine.request_error import RequestError
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest, Prompt
from serving.engine.requests.sampling_params import SamplingParams


class AsyncEngine:
    """Serves requests on an engine or on all engines of a group. Every method may be called from any asyncio task.

    Each engine runs in a separate thread: no replica waits for a step of another.

    Args:
        engine: only this object may use it from now on.
    """

    def __init__(self, engine: Engine | EngineGroup) -> None:
        self.engines = engine.engines
        """All engines, for properties that never change while they run. Use `call_all` for others."""
        names = ["engine"] if len(self.engines) == 1 else [f"engine {i}" for i in range(len(self.engines))]
        self._threads = [EngineThread(each, name) for each, name in zip(self.engines, names, strict=True)]
        self._placing = ReplicaLoads(self.engines)
        self._ids = itertools.count()
        self._ids_in_use: set[str] = set()
        self._loading = asyncio.Lock()
        """Held while an adapter is loaded or removed, so that all engines do it in the same order."""

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        live: bool = True,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt. Yields the output as it grows; the last output is finished.

        Each output is a copy that later steps do not change. Leaving the iteration early, by `break`, cancellation or
        an error, aborts the request. With `live=False` only the finished output is yielded, which costs less.
        `options` are further fields of `EngineRequest`.

        Raises:
            RequestError, RequestFailed, EngineStopped: see `stream`.
        """
        name = request_id if request_id is not None else f"async-{next(self._ids)}"
        whole: RequestOutput | None = None
        request = EngineRequest(name, prompt, sampling_params or SamplingParams(), live=live, **options)
        async with contextlib.aclosing(self.stream(request)) as deltas:
            async for new in deltas:
                if whole is None:
                    whole = new
                else:
                    whole.extend(new)
                yield whole.copy()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request. Yields deltas if it is live, otherwise only the finished output. Leaving early aborts it.

        All choices of the request run on one engine. If its queue is full, the next best engine gets the request.

        Raises:
            RequestError: the request cannot be served as asked. With a grammar, this can occur after some tokens.
            RequestFailed: the engine ended the request with an error.
            EngineStopped: the engine has stopped.
        """
        name = request.request_id
        if name in self._ids_in_use:
            raise RequestError(f"request id {name!r} is in use")
        ids: list[int] = []
        if len(self.engines) > 1:
            text, ids = self.engine.prompt_ids(request.prompt)
            request = replace(request, prompt={"prompt": text, "prompt_token_ids": ids})
        full: list[int] = []
        while True:
            place = self._placing.give(ids, request, without=full)
            thread, stream = self._threads[place.replica], Stream(request.live, place.computed)
            self._ids_in_use.add(name)
            thread.add(request, stream)
            try:
                while True:
                    output = await stream.get()
                    if output.failure is not None:
                        raise output.failure
                    if output.finished:
                        break
                    yield output
            except RequestError as error:
                full.append(place.replica)
                if not self._placing.tries_another(error, full):
                    raise
                continue
            finally:
                thread.forget(name, stream)
                place.ended()
                self._ids_in_use.discard(name)
            yield output
            return

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iteration yields the output so far, with finish reason `abort`."""
        for thread in self._threads:
            thread.abort(request_id)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Calls a function with each engine between two of its steps; returns the result for the first."""
        return (await self.call_all(function))[0]

    async def call_all(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with each engine between two of its steps; returns the results in the engines' order.

        If the function raises an error for one engine, the other engines still run it.
        """
        return await _all(thread.call(function) for thread in self._threads)

    async def update_weights(self, given: NewWeights, *, version: str | int | None, partial: bool) -> None:
        """Replaces the weights of every engine between two steps; see `Control.update_weights`.

        The engines do not wait for each other. Outputs name the version of the engine that produced them.
        """
        await self.call_all(Update.of(self.engines, given, version=version, partial=partial).apply)

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter on every engine, and replaces one with the same name. The files are read while steps run.

        Raises:
            RequestError: the adapter cannot be loaded on one of the engines. Every engine keeps the adapters that it
                has.
        """
        adapter = await asyncio.to_thread(table_of(self.engine).read, name, path)
        load = AdapterLoad(name, path, adapter)
        async with self._loading:
            try:
                await self.call_all(load.reserve)
            except BaseException:
                self.tell(load.cancel)
                raise
            try:
                await self.call_all(load.commit)
            except BaseException:
                self.tell(load.remove)
                raise

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter from every engine. Requests that use it keep it until they end."""
        async with self._loading:
            await self.call_all(lambda engine: table_of(engine).remove(name))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pauses every engine (see `Control.pause`); returns when no more steps are dispatched."""
        await _all(thread.pause(mode) for thread in self._threads)

    def tell(self, function: Callable[[Engine], Any]) -> None:
        """Calls a function like `call_all`, without waiting for the results. An engine that stops first does not run
        the function."""
        for thread in self._threads:
            thread.tell(function)

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began, for the engine with the longest step; 0 between steps."""
        return max(thread.step_seconds for thread in self._threads)

    @property
    def running(self) -> bool:
        """Whether all engines run: False after `shutdown` and after a permanent failure of one.

        The others may then finish their requests, but the process must be restarted.
        """
        return all(thread.running for thread in self._threads)

    @property
    def abandoned(self) -> bool:
        """Whether `shutdown` stopped waiting for a step. Its thread then ends only with the process."""
        return any(thread.abandoned for thread in self._threads)

    @property
    def engine(self) -> Engine:
        """One of the engines, for properties that never change and are the same for all (tokenizer, limits)."""
        return self.engines[0]

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests on all engines."""
        return sum(engine.num_unfinished for engine in self.engines)

    @property
    def latest_stats(self) -> dict[str, Any]:
        """Recent statistics, without waiting for an engine: `Engine.stats()`, for several engines `merged`.

        They are at most a quarter of a second old, or as old as the current step if that takes longer.
        """
        stats = [thread.latest_stats for thread in self._threads]
        return stats[0] if len(stats) == 1 else merged(stats)

    def shutdown(self, step_timeout: float | None = None) -> bool:
        """Stops the threads; iterations in progress raise `EngineStopped`.

        `step_timeout`: seconds to wait for running steps; None waits until they end. Returns False, and sets
        `abandoned`, if a step still runs after that time.
        """
        for thread in self._threads:
            thread.stop()  # all at once: no engine waits for another to compile or to write
        end = None if step_timeout is None else time.monotonic() + step_timeout
        for thread in self._threads:
            thread.shutdown(None if end is None else max(0.0, end - time.monotonic()))
        return not self.abandoned


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Waits for all calls and returns their results; raises the first error afterwards."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
