"""Runs an engine or its replicas for concurrent callers and streams outputs to asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial as bound
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.tensors.replacement import NewWeights, open_weights
from checkpoints.tensors.tensor_set import TensorSet
from serving.core.errors import RequestError
from serving.engine.changes import load_adapter, table_of, weights_update
from serving.engine.control import PauseMode
from serving.engine.engine import Engine
from serving.engine.engine_thread import Result
from serving.engine.replicas import Assignment, ReplicaThreads
from serving.engine.requests.adapter_reads import AdapterReads
from serving.engine.requests.adapters import AdapterNotRead
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest, Prompt
from serving.engine.requests.sampling_params import SamplingParams

_PAUSE_LOOK = 0.02
"""Seconds between checks whether the last request has ended, during a pause."""
READ_WEIGHTS_SECONDS = 3600.0
"""Deadline of reading the files of new weights."""


class AsyncEngine(ReplicaThreads):
    """Serves requests on an engine or on replicas of one. Every method may be called from any asyncio task.

    Each engine runs in a separate thread: no replica waits for a step of another.

    Args:
        engines: an engine or several; only this object may use them from now on.
    """

    def __init__(self, engines: Engine | Sequence[Engine]) -> None:
        super().__init__(engines, _deliver)
        self._ids = itertools.count()
        self._ids_in_use: set[str] = set()
        self._reading: dict[str, bool] = {}
        """Requests whose adapter is being read, and whether they were aborted meanwhile."""
        for engine in self.engines:
            if engine.adapters is not None:
                engine.adapters.reads_files = False
        self._reads = AdapterReads()
        self._loading = asyncio.Lock()
        self._updating = asyncio.Lock()
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
                whole = new if whole is None else whole.extend(new)
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
        self._reads.seen(request.client)
        request, ids = self.with_tokens(request)
        full: list[int] = []
        aborted = False
        while True:
            given, request = request, replace(request, adapter_content=None)  # only one queue holds what may be large
            mailbox = _Mailbox(self.loads.give(ids, request, without=full))
            thread = self.threads[mailbox.assignment.replica]
            self._ids_in_use.add(name)
            thread.add(given, mailbox)
            del given
            if aborted:
                thread.abort(name)
            try:
                while True:
                    output = await mailbox.get()
                    if output.failure is not None:
                        raise output.failure
                    if output.finished:
                        break
                    yield output
            except AdapterNotRead:
                self._reading[name] = aborted
                try:
                    request = await self._with_adapter(request, self.engines[mailbox.assignment.replica])
                finally:
                    aborted = self._reading.pop(name)
                continue
            except RequestError as error:
                full.append(mailbox.assignment.replica)
                if not self.loads.tries_another(error, full):
                    raise
                continue
            finally:
                thread.forget(name, mailbox)
                mailbox.assignment.ended()
                self._ids_in_use.discard(name)
            yield output
            return

    async def _with_adapter(self, request: EngineRequest, engine: Engine) -> EngineRequest:
        wanted = request.lora_request
        assert wanted is not None
        table = table_of(engine)
        content = await self._reads.in_turn(
            request.client,
            lambda: table.read(wanted.lora_name, wanted.lora_path),
            loaded=lambda: table.find(wanted) is not None,
        )
        return replace(request, adapter_content=content)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iteration yields the output so far, with finish reason `abort`."""
        if request_id in self._reading:
            self._reading[request_id] = True
        for thread in self.threads:
            thread.abort(request_id)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Calls a function with each engine between two of its steps; returns the result for the first."""
        return (await self.call_all(function))[0]

    async def call_all(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with each engine between two of its steps; returns the results in the engines' order.

        If the function raises an error for one engine, the other engines still run it.
        """
        calls = map(asyncio.wrap_future, self.calls(function))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return list(results)

    async def update_weights(self, given: NewWeights, *, version: str | int | None, partial: bool) -> None:
        """Replaces the weights of every engine between two steps; see `Control.update_weights`.

        The engines do not wait for each other. Outputs name the version of the engine that produced them. Files are
        read in another thread, for at most `READ_WEIGHTS_SECONDS`.
        """
        async with self._updating:  # a later update that is read faster does not come first
            if isinstance(given, str | Path):
                given = await self._reads.read(bound(_opened, given), READ_WEIGHTS_SECONDS)
            await self.call_all(weights_update(self.engines, given, version=version, partial=partial))

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter on every engine, and replaces one with the same name. Its files are read in another thread.

        Raises:
            RequestError: the adapter cannot be loaded on one of the engines. Every engine keeps the adapters that it
                has.
        """
        adapter = await self._reads.read(lambda: table_of(self.engine).read(name, path))
        await asyncio.shield(self._exclusively(load_adapter, name, path, adapter, self.call_each))

    async def unload_adapter(self, name: str) -> None:
        """Removes an adapter from every engine. Requests that use it keep it until they end."""
        await asyncio.shield(self._exclusively(self.call_each, lambda engine: table_of(engine).remove(name)))

    async def _exclusively(self, function: Callable[..., object], *arguments: Any) -> None:
        async with self._loading:
            await asyncio.to_thread(function, *arguments)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pauses every engine (see `Control.pause`); returns when no more steps are dispatched."""
        await self.call_all(lambda engine: engine.control.pause(mode))
        while not all(engine.control.paused for engine in self.engines) and self.running:
            await asyncio.sleep(_PAUSE_LOOK)


class _Mailbox:
    """Carries results from an engine's thread to one asyncio task."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment, self.takes = assignment, assignment.takes
        self.loop = asyncio.get_running_loop()
        self._unread: Result | None = None
        self._arrived = asyncio.Event()

    def put(self, result: Result) -> None:
        """Puts a result into the mailbox, called from the event loop's thread."""
        if isinstance(result, RequestOutput) and isinstance(self._unread, RequestOutput):
            self._unread.extend(result)  # a slow reader gets several deltas as one
        else:
            self._unread = result
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Returns the new output; raises the error that ended the request."""
        await self._arrived.wait()
        self._arrived.clear()
        result, self._unread = self._unread, None
        assert result is not None
        if isinstance(result, Exception):
            raise result
        return result


def _deliver(results: Sequence[tuple[_Mailbox, Result]]) -> None:
    """Puts results into their mailboxes, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Result]]] = {}
    for mailbox, result in results:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, result))

    def put(part: Sequence[tuple[_Mailbox, Result]]) -> None:
        for mailbox, result in part:
            mailbox.put(result)

    for loop, part in by_loop.items():
        # A closed event loop raises RuntimeError; it has no reader.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(put, part)


def _opened(directory: str | Path) -> TensorSet:
    try:
        return open_weights(directory)
    except CheckpointError as error:
        raise RequestError(str(error)) from None
