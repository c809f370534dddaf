"""One engine in a thread: commands run between its steps, and its outputs go to the readers of the requests."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from serving.engine.engine import Engine
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest

log = logging.getLogger(__name__)

_STATS_EVERY = 0.25
"""Seconds after which a busy engine updates its statistics."""

Result = RequestOutput | Exception
"""A request's new output, or the error that ended it."""
Deliver = Callable[[Sequence[tuple[Any, Result]]], None]
"""Called with the results of a step: pairs of a reader, as `EngineThread.add` was given it, and a result. A reader's
method `takes` says which outputs it gets."""


class EngineStopped(RuntimeError):
    """The engine was shut down or failed permanently; unfinished requests will not finish."""


class EngineThread:
    """Drives one `Engine` in a thread: runs commands between its steps and delivers outputs.

    Args:
        engine: only the thread may use it from now on.
        deliver: called on the engine's thread, or on the caller's if the engine has stopped.
        name: the name of the thread.
    """

    def __init__(self, engine: Engine, deliver: Deliver, name: str = "engine") -> None:
        self.engine = engine
        """Use this only for properties that never change while the engine runs (tokenizer, limits). For others, use
        `call`."""
        self._deliver = deliver
        self._commands: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]] | None] = queue.SimpleQueue()
        """Functions to call between two steps and their future results; None ends the thread."""
        self._readers: dict[str, Any] = {}
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

    def add(self, request: EngineRequest, reader: Any) -> None:
        """Adds a request to the engine. Its outputs, or the error if the engine refuses it, go to `reader`."""

        def refuse(error: Exception) -> None:
            self._deliver([(reader, error)])

        self._call(lambda engine: self._add(request, reader), refuse)

    def _add(self, request: EngineRequest, reader: Any) -> None:
        self.engine.add(request)
        self._readers[request.request_id] = reader

    def forget(self, request_id: str, reader: Any) -> None:
        """Aborts the request of a disconnected reader, unless another request uses the same id by now."""

        def forget(engine: Engine) -> None:
            if self._readers.get(request_id) is reader:
                del self._readers[request_id]
                engine.abort(request_id)

        self.tell(forget)

    def abort(self, request_id: str) -> None:
        """Ends a request, if the engine has it; its reader gets the output so far."""
        self.tell(lambda engine: engine.abort(request_id))

    def call(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Calls a function with the engine between two steps; returns its future result."""
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()  # the function runs even if the caller is cancelled
        with self._gate:
            if self._stopped is None:
                self._commands.put((function, result))
                return result
        result.set_exception(EngineStopped(str(self._stopped)))
        return result

    def _call(self, function: Callable[[Engine], Any], failed: Callable[[Exception], None]) -> None:
        """Calls a function like `call`. `failed` is called with its error, and if the engine stops first."""

        def done(result: Future[Any]) -> None:
            if isinstance(error := result.exception(), Exception):
                failed(error)

        self.call(function).add_done_callback(done)

    def tell(self, function: Callable[[Engine], Any]) -> None:
        """Calls a function like `call`, without a result. If the engine stops first, the function does not run."""

        def failed(error: Exception) -> None:
            if not isinstance(error, EngineStopped):
                log.error("engine callback failed", exc_info=error)

        self._call(function, failed)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[Callable[[EngineRequest, Any], None]]:
        """Holds the thread between two steps. Yields a function that adds a request like `add`, but raises its error.

        Raises:
            EngineStopped: the engine has stopped.
        """
        leave = threading.Event()
        resting: Future[None] = Future()

        def rest(engine: Engine) -> None:
            resting.set_result(None)
            leave.wait()

        self._call(rest, resting.set_exception)
        try:
            resting.result()
            yield self._add
        finally:
            leave.set()

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
        """Stops the thread; unfinished requests end with `EngineStopped`.

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
        self._deliver([(reader, reason) for reader in list(self._readers.values())])

    def stop(self) -> None:
        """Stops the thread like `shutdown`, without waiting for it."""
        self.engine.loop.leaving.set()
        self._commands.put(None)

    # -- on the engine's thread --

    def _fail_commands(self, reason: Exception) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command[1].set_exception(reason)

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
        self._deliver([(reader, reason) for reader in self._readers.values()])
        self._readers.clear()
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
            function, result = command
            try:
                value = function(self.engine)
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

    def _count(self) -> None:
        self.latest_stats, self._counted_at = self.engine.stats(), time.monotonic()

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        results: list[tuple[Any, Result]] = []
        for output in outputs:
            if (reader := self._readers.get(output.request_id)) is None:
                continue
            if output.finished:
                del self._readers[output.request_id]
            if reader.takes(output):
                results.append((reader, output))
        if results:
            self._deliver(results)
