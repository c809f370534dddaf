"""One engine in a thread: commands run between its steps, and outputs stream to asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from serving.engine.control import PauseMode
from serving.engine.engine import Engine
from serving.engine.request_error import RequestError
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest

log = logging.getLogger(__name__)

_PAUSE_LOOK = 0.02
"""Seconds between checks whether the last request has ended, during a pause."""
_STATS_EVERY = 0.25
"""Seconds after which a busy engine updates its statistics."""


class EngineStopped(RuntimeError):
    """The engine was shut down or failed permanently; unfinished requests will not finish."""


@dataclass(frozen=True)
class _Command:
    """A function for the engine's thread, and one that is called instead if the engine stops first."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class Stream:
    """Carries outputs from the engine's thread to one asyncio task.

    Args:
        live: whether to carry deltas, not only the finished output.
        begun: called on the engine's thread when the first token is available.
    """

    def __init__(self, live: bool, begun: Callable[[], None]) -> None:
        self.live = live
        self.begun: Callable[[], None] | None = begun
        self.loop = asyncio.get_running_loop()
        self._unread: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        """Puts an item into the stream, called from the engine's thread."""
        _deliver(self.loop, [(self, item)])

    def put_nowait(self, item: RequestOutput | Exception) -> None:
        """Puts an item into the stream, called from the event loop's thread."""
        if isinstance(item, RequestOutput) and isinstance(self._unread, RequestOutput):
            self._unread.extend(item)  # a slow reader gets several deltas as one
        else:
            self._unread = item
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Returns the new output; raises the error that ended the request."""
        await self._arrived.wait()
        self._arrived.clear()
        item, self._unread = self._unread, None
        assert item is not None
        if isinstance(item, Exception):
            raise item
        return item


class EngineThread:
    """Drives one `Engine` in a thread: runs commands between its steps and delivers outputs to streams.

    Args:
        engine: only the thread may use it from now on.
        name: the name of the thread.
    """

    def __init__(self, engine: Engine, name: str = "engine") -> None:
        self.engine = engine
        """Use this only for properties that never change while the engine runs (tokenizer, limits). For others, use
        `call`."""
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._stopped: Exception | None = None
        self._left = threading.Event()
        """Set when the thread has run its last step; it may still write states to the disk tier."""
        self.abandoned = False
        """Whether `shutdown` stopped waiting for a step. The thread then ends only with the process."""
        self.latest_stats, self._counted_at = engine.stats(), time.monotonic()
        """A recent `Engine.stats()`: at most a quarter of a second old, or as old as the current step."""
        self._step_began: float | None = None
        self._gate = threading.Lock()
        """Held while a command is queued and while the queue is closed, so that each command runs or fails."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, request: EngineRequest, stream: Stream) -> None:
        """Adds a request to the engine. Its outputs, or the error if the engine refuses it, go to `stream`."""

        def add() -> None:
            if request.request_id in self._streams:
                stream.put(RequestError(f"request id {request.request_id!r} is in use"))
                return
            try:
                self.engine.add(request)
            except Exception as error:
                stream.put(error)
                return
            self._streams[request.request_id] = stream

        self._submit(add, stream.put)

    def forget(self, request_id: str, stream: Stream) -> None:
        """Aborts the request of a disconnected reader, unless another request uses the same id by now."""

        def forget() -> None:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self.engine.abort(request_id)

        self._submit(forget)

    def abort(self, request_id: str) -> None:
        """Ends a request, if the engine has it; its stream gets the output so far."""
        self.tell(lambda engine: engine.abort(request_id))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Calls a function with the engine between two steps and returns its result."""
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # the function runs even if the caller is cancelled

        def run() -> None:
            try:
                value = function(self.engine)
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        self._submit(run, result.set_exception)
        return await asyncio.wrap_future(result)

    async def pause(self, mode: PauseMode) -> None:
        """Pauses the engine (see `Control.pause`); returns when no more steps are dispatched."""
        await self.call(lambda engine: engine.control.pause(mode))
        while not self.engine.control.paused and self.running:
            await asyncio.sleep(_PAUSE_LOOK)

    def tell(self, function: Callable[[Engine], Any]) -> None:
        """Calls a function like `call`, without waiting for the result. If the engine stops first, the function does
        not run."""
        self._submit(lambda: _quietly(function, self.engine))

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        begin = self._step_began
        return 0.0 if begin is None else time.monotonic() - begin

    @property
    def running(self) -> bool:
        """Whether requests can be served: False after `shutdown` and after a permanent failure."""
        return self._stopped is None

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
        """Fails every request that waits for the thread, because the thread does not return from a step."""
        reason = EngineStopped(
            f"the engine is shutting down, and its step has not ended after {self.step_seconds:.0f} s"
        )
        log.critical("%s; it is abandoned", reason)
        with self._gate:
            self.abandoned, self._stopped = True, self._stopped or reason
        self._fail_commands(reason)
        self._commands.put(None)  # if the step ends after all, the thread ends too
        for stream in list(self._streams.values()):
            stream.put(reason)

    def stop(self) -> None:
        """Stops the thread like `shutdown`, without waiting for it."""
        self.engine.loop.leaving.set()
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
        """Fails the commands that were queued before the gate closed."""
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
                outputs = self.engine.step()
                self._step_began = None
                # Update the statistics before publishing: they must include every output that a client has received.
                if time.monotonic() - self._counted_at > _STATS_EVERY or not self.engine.num_unfinished:
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
        self.engine.close()

    def _take_commands(self) -> bool:
        """Runs queued commands; waits for one while the engine is idle. Returns False on shutdown."""
        while True:
            busy = self.engine.busy
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
        self.latest_stats, self._counted_at = self.engine.stats(), time.monotonic()

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        """Delivers a step's outputs to their readers, waking each event loop once per step."""
        letters: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput | Exception]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if stream.begun is not None and any(choice.token_ids for choice in output.outputs):
                stream.begun()
                stream.begun = None
            if not (stream.live or output.finished):
                continue
            letters.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, items in letters.items():
            _deliver(loop, items)


def _quietly(function: Callable[[Engine], Any], engine: Engine) -> None:
    try:
        function(engine)
    except Exception:
        log.exception("engine callback failed")


def _deliver(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[Stream, RequestOutput | Exception]]) -> None:
    def put() -> None:
        for stream, item in items:
            stream.put_nowait(item)

    # A closed event loop raises RuntimeError; it has no reader.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(put)
