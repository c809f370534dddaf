"""Several engines of one model behind one interface, for concurrent callers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from checkpoints.replacement import NewWeights, repeatable
from serving.engine.async_engine import AsyncEngine
from serving.engine.control import PauseMode
from serving.engine.engine import Engine
from serving.engine.output import RequestOutput
from serving.engine.placing import Placing
from serving.engine.prompt import Prompt
from serving.engine.replica_stats import merged
from serving.engine.request_error import RequestError
from serving.engine.sampling_params import SamplingParams
from serving.engine.weights import Update


class Replicas:
    """An `AsyncEngine` over several engines. Each runs in a separate thread, and serves some of the requests.

    Args:
        engines: replicas of one model. Only this object may use them from now on.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._served = tuple(AsyncEngine(engine, name=f"engine {i}") for i, engine in enumerate(engines))
        self._placing = Placing(engines)
        self._ids = itertools.count()
        self._at: dict[str, AsyncEngine] = {}

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncEngine.generate`. If the queue of the chosen replica is full, the next best one is tried."""
        assert export is None, "a worker of a split has one engine"
        name = request_id if request_id is not None else f"async-{next(self._ids)}"
        if name in self._at:
            raise RequestError(f"request id {name!r} is in use")
        text, ids = self.engine.prompt_ids(prompt)
        given: Prompt = {"prompt": text, "prompt_token_ids": ids}
        full: list[int] = []
        while True:
            place = self._placing.give(ids, sampling_params, cache_salt, without=full)
            served = self._at[name] = self._served[place.replica]
            outputs = served.generate(
                given, sampling_params, name,
                priority=priority, cache_salt=cache_salt, client=client, batch_id=batch_id, live=live,
                begun=place.computed,
            )  # fmt: skip
            try:
                async with contextlib.aclosing(outputs) as each:
                    async for output in each:
                        yield output
                return
            except RequestError as error:
                full.append(place.replica)
                if not error.retry or not self._placing.any_open(full):
                    raise
            finally:
                place.ended()
                del self._at[name]

    async def abort(self, request_id: str) -> None:
        """As `AsyncEngine.abort`."""
        served = self._at.get(request_id)
        if served is not None:
            await served.abort(request_id)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Calls a function with each engine between two of its steps; returns the result for the first."""
        return (await self.call_all(function))[0]

    async def call_all(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with each engine between two of its steps; returns the results in the engines' order.

        If it raises an error for one engine, it is still called with the others.
        """
        return await _all(served.call(function) for served in self._served)

    async def update_weights(self, given: NewWeights, *, version: str | int | None, partial: bool) -> None:
        """As `AsyncEngine.update_weights`, on every engine with the same version.

        The engines do not wait for each other. Outputs name the version of the engine that produced them.
        """
        update = Update.of([engine.control.weights for engine in self.engines], version)
        again = repeatable(given)

        def take(engine: Engine) -> None:
            engine.control.update_weights(again, version=update.version, partial=partial)

        pairs = zip(self._served, update.lacking, strict=True)
        await _all(served.call(take) for served, lacks in pairs if lacks)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """As `AsyncEngine.pause`."""
        await _all(served.pause(mode) for served in self._served)

    def tell(self, function: Callable[[Engine], Any]) -> None:
        """As `AsyncEngine.tell`, to every engine."""
        for served in self._served:
            served.tell(function)

    @property
    def step_seconds(self) -> float:
        """The longest of the engines' times."""
        return max(served.step_seconds for served in self._served)

    @property
    def running(self) -> bool:
        """Whether all engines run. If one has failed, the process must be restarted, as with one engine; the others
        may finish their requests."""
        return all(served.running for served in self._served)

    @property
    def engine(self) -> Engine:
        """One of the engines, for properties that never change and are the same for all (tokenizer, limits)."""
        return self._served[0].engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines; see `engine`."""
        return tuple(served.engine for served in self._served)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests on all engines."""
        return sum(served.num_unfinished for served in self._served)

    @property
    def latest_stats(self) -> dict[str, Any]:
        """The merged statistics of all engines, and those of each engine under `engines`."""
        return merged([served.latest_stats for served in self._served])

    def shutdown(self, step_timeout: float | None = None) -> bool:
        """As `AsyncEngine.shutdown`."""
        for served in self._served:
            served.stop()  # all at once: no engine waits for another to compile or to write
        end = None if step_timeout is None else time.monotonic() + step_timeout
        ended = True
        for served in self._served:
            ended &= served.shutdown(None if end is None else max(0.0, end - time.monotonic()))
        return ended

    @property
    def abandoned(self) -> bool:
        """Whether any engine is abandoned; see `AsyncEngine.abandoned`."""
        return any(served.abandoned for served in self._served)


Served = AsyncEngine | Replicas
"""The engine of a server."""


def serve_engines(engines: Sequence[Engine]) -> Served:
    """The asynchronous interface of one engine, or of several replicas."""
    return AsyncEngine(engines[0]) if len(engines) == 1 else Replicas(engines)


async def _all(calls: Any) -> list[Any]:
    """Waits for all calls and returns their results; raises the first error afterwards."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
