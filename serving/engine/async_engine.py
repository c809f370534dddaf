"""The engine for concurrent callers: steps run in a separate thread, and outputs stream to asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpoints.replacement import NewWeights
from serving.engine.control import PauseMode
from serving.engine.engine import Engine
from serving.engine.output import RequestOutput
from serving.engine.prompt import Prompt
from serving.engine.request_error import RequestError
from serving.engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_PAUSE_LOOK = 0.02
"""Seconds between checks of a pause whether the last request has ended."""
_STATS_EVERY = 0.25
"""Seconds after which a busy engine updates its statistics."""


class EngineStopped(RuntimeError):
    """The engine was shut down or failed permanently; unfinished requests will not finish."""


@dataclass(frozen=True)
class _Command:
    """A function for the engine's thread, and what is called instead if the engine stops before it has run."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class _Stream:
    """Carries outputs from the engine's thread to one asyncio task."""

    def __init__(self, live: bool, begun: Callable[[], None] | None) -> None:
        self.live, self.begun = live, begun
        self.loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, item: RequestOutput | Exception) -> None:
        """From the engine's thread."""
        _deliver(self.loop, [(self, item)])

    def put_nowait(self, item: RequestOutput | Exception) -> None:
        """From the loop's own thread."""
        self._items.put_nowait(item)

    async def get(self) -> RequestOutput:
        item = await self._items.get()
        # A slow reader gets only the newest output: it contains all earlier ones.
        while isinstance(item, RequestOutput) and not item.finished and not self._items.empty():
            item = self._items.get_nowait()
        if isinstance(item, Exception):
            raise item
        return item


class AsyncEngine:
    """Runs an `Engine` in a thread. Every method may be called from any asyncio task.

    Args:
        engine: only this object may use it from now on.
        name: the name of the thread.
    """

    def __init__(self, engine: Engine, *, name: str = "engine") -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()
        self._stopped: Exception | None = None
        self._left = threading.Event()
        """Set when the thread has run its last step; it may still write states to the disk tier."""
        self.abandoned = False
        """Whether `shutdown` stopped waiting for a step. The thread then ends only with the process."""
        self._latest_stats, self._counted_at = engine.stats(), time.monotonic()
        self._step_began: float | None = None
        self._gate = threading.Lock()
        """Held while a command is queued and while the queue is closed, so that each command runs or fails."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str | None = None,
        batch_id: str | None = None,
        live: bool = True,
        export: Any = None,
        begun: Callable[[], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt, yielding the output as it grows; the last one is finished.

        Each output is a copy that later steps do not change. Leaving the iteration early, by `break`, cancellation or
        an error, aborts the request. With `live=False` only the finished output is yielded, which costs less.

        `client`, `batch_id` and `export` are arguments of `Engine.add_request`. `begun` is called on the engine's
        thread when the first token is available.

        Raises:
            RequestError: the request cannot be served as asked; with a grammar this may be raised after some tokens.
            RequestFailed: the engine ended the request with an error.
            EngineStopped: the engine has stopped.
        """
        name = request_id if request_id is not None else f"async-{next(self._ids)}"
        stream = _Stream(live, begun)

        def add() -> None:
            if name in self._streams:
                stream.put(RequestError(f"request id {name!r} is in use"))
                return
            try:
                self._engine.add_request(
                    name,
                    prompt,
                    sampling_params,
                    priority=priority,
                    cache_salt=cache_salt,
                    client=client,
                    batch_id=batch_id,
                    live_text=live,
                    export=export,
                )
            except Exception as error:
                stream.put(error)
                return
            self._streams[name] = stream

        self._submit(add, stream.put)
        try:
            while True:
                output = await stream.get()
                if output.failure is not None:
                    raise output.failure
                yield output
                if output.finished:
                    return
        finally:
            self._submit(lambda: self._forget(name, stream))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iteration yields the output so far, with finish reason `abort`."""
        self._submit(lambda: self._abort(request_id))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Calls a function with the engine between two steps, for example to read its statistics."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if result.done():  # the caller was cancelled
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def run() -> None:
            value, failure = None, None
            try:
                value = function(self._engine)
            except Exception as error:
                failure = error
            _tell(loop, lambda: settle(value, failure))

        self._submit(run, lambda error: _tell(loop, lambda: settle(None, error)))
        return await result

    async def call_all(self, function: Callable[[Engine], Any]) -> list[Any]:
        """The results of `call` for every engine; here there is one."""
        return [await self.call(function)]

    async def update_weights(self, given: NewWeights, *, version: str | int | None, partial: bool) -> None:
        """Replaces the weights between two steps; see `Control.update_weights`."""
        await self.call(lambda engine: engine.control.update_weights(given, version=version, partial=partial))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pauses the engine (see `Control.pause`); returns when no more steps are dispatched."""
        await self.call(lambda engine: engine.control.pause(mode))
        while not self._engine.control.paused and self.running:
            await asyncio.sleep(_PAUSE_LOOK)

    def tell(self, function: Callable[[Engine], Any]) -> None:
        """Like `call`, without waiting for the result. The function does not run if the engine stops first."""
        self._submit(lambda: _quietly(function, self._engine))

    @property
    def step_seconds(self) -> float:
        """Seconds since the present step began; 0 between steps."""
        begin = self._step_began
        return 0.0 if begin is None else time.monotonic() - begin

    @property
    def running(self) -> bool:
        """Whether requests can be served: False after `shutdown` and after a permanent failure."""
        return self._stopped is None

    @property
    def engine(self) -> Engine:
        """The engine, for properties that never change while it runs (tokenizer, limits). Use `call` for others."""
        return self._engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines: here one. See `engine`."""
        return (self._engine,)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return self._engine.num_unfinished

    @property
    def latest_stats(self) -> dict[str, Any]:
        """A recent `Engine.stats()`, without waiting for the engine's thread.

        It is at most a quarter of a second old, or as old as the present step if that takes longer.
        """
        return self._latest_stats

    def shutdown(self, step_timeout: float | None = None) -> bool:
        """Stops the thread; iterations in progress raise `EngineStopped`.

        `step_timeout`: seconds to wait for the step that runs; None waits until it ends. Returns False, and sets
        `abandoned`, if the step still runs by then.
        """
        self.stop()
        if not self.abandoned and not self._left.wait(step_timeout):
            self._abandon()
        if not self.abandoned:
            self._thread.join()
        return not self.abandoned

    def _abandon(self) -> None:
        """The thread does not return from a step: fails every request that waits for it."""
        reason = EngineStopped(
            f"the engine is shutting down, and its step has not ended after {self.step_seconds:.0f} s"
        )
        log.critical("%s; it is abandoned", reason)
        with self._gate:
            self.abandoned, self._stopped = True, self._stopped or reason
        self._fail_commands(reason)
        self._commands.put(None)  # should the step end after all, the thread does too
        for stream in list(self._streams.values()):
            stream.put(reason)

    def stop(self) -> None:
        """Stops the thread like `shutdown`, without waiting for it."""
        self._engine.loop.leaving.set()
        self._commands.put(None)

    # -- on the engine's thread --

    def _submit(self, run: Callable[[], None], fail: Callable[[Exception], None] = lambda error: None) -> None:
        """Queues a command. `fail` is called instead if the engine has stopped, or stops first."""
        with self._gate:
            if self._stopped is None:
                self._commands.put(_Command(run, fail))
                return
        fail(EngineStopped(str(self._stopped)))

    def _fail_commands(self, reason: Exception) -> None:
        """Fails what was queued before the gate closed."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command.fail(reason)

    def _run(self) -> None:
        reason: Exception = EngineStopped("the engine has been shut down")
        try:
            while self._take_commands():
                self._step_began = time.monotonic()
                outputs = self._engine.step()
                self._step_began = None
                # Before outputs are published: a client that has its last output finds it in the statistics.
                if time.monotonic() - self._counted_at > _STATS_EVERY or not self._engine.num_unfinished:
                    self._count()
                self._publish(outputs)
        except Exception as error:
            log.exception("the engine has failed")
            reason = EngineStopped(f"the engine has failed: {error}")
        with self._gate:
            self._stopped = reason
        self._left.set()
        self._fail_commands(reason)
        for stream in self._streams.values():
            stream.put(reason)
        self._streams.clear()
        self._engine.close()

    def _take_commands(self) -> bool:
        """Runs queued commands; waits for one while the engine is idle. Returns False on shutdown."""
        while True:
            busy = self._engine.busy
            if not busy:
                self._count()
            try:
                command = self._commands.get(block=not busy)
                if not busy:
                    self._counted_at = 0.0  # update the statistics after the next step
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()

    def _count(self) -> None:
        self._latest_stats, self._counted_at = self._engine.stats(), time.monotonic()

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Delivers a step's outputs to their readers, waking each event loop once per step."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput | Exception]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if stream.begun is not None and any(choice.token_ids for choice in output.outputs):
                stream.begun()
                stream.begun = None
            if not (stream.live or output.finished):
                continue
            # A finished output no longer changes: no copy is needed.
            letters.setdefault(stream.loop, []).append((stream, output if output.finished else _copy(output)))
            if output.finished:
                del self._streams[output.request_id]
        for loop, items in letters.items():
            _deliver(loop, items)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        if output is not None:
            self._publish([output])

    def _forget(self, name: str, stream: _Stream) -> None:
        """Aborts the request of a reader that has left, unless another request uses the id by now."""
        if self._streams.get(name) is stream:
            del self._streams[name]
            self._engine.abort(name)


def _quietly(function: Callable[[Engine], Any], engine: Engine) -> None:
    try:
        function(engine)
    except Exception:
        log.exception("engine callback failed")


def _deliver(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Stream, RequestOutput | Exception]]) -> None:
    def put() -> None:
        for stream, item in items:
            stream.put_nowait(item)

    _tell(loop, put)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # The loop may have been closed: then there is no reader.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _copy(output: RequestOutput) -> RequestOutput:
    choices = [
        replace(
            choice,
            token_ids=list(choice.token_ids),
            logprobs=None if choice.logprobs is None else list(choice.logprobs),
            weights_versions=list(choice.weights_versions),
        )
        for choice in output.outputs
    ]
    return replace(output, outputs=choices, metrics=None if output.metrics is None else replace(output.metrics))
