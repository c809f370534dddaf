"""Several engines of one model behind the interface of one, for one caller: offline inference over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from checkpoints.replacement import NewWeights, repeatable
from serving.engine.control import PauseMode
from serving.engine.engine import Engine
from serving.engine.output import RequestOutput
from serving.engine.placing import Assignment, Placing
from serving.engine.prompt import Prompt
from serving.engine.request_error import RequestError
from serving.engine.sampling_params import SamplingParams
from serving.engine.weights import Update


class EngineGroup:
    """Runs requests on several replicas with the methods of `Engine`. Each replica steps in a separate thread.

    Not thread-safe: one caller drives it. The caller uses an engine only between two of its steps.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self.control = GroupControl(self)
        self._placing = Placing(engines)
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="engine")
        self._steps: dict[int, Future[list[RequestOutput]]] = {}
        self._given: dict[str, Assignment] = {}
        """Unfinished requests and their replicas, by request id."""
        self._unsaid: list[RequestOutput] = []

    @property
    def max_model_len(self) -> int:
        """As `Engine.max_model_len`, equal for all replicas."""
        return self.engines[0].max_model_len

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose finished output `step` has not returned yet."""
        return len(self._given)

    def is_unfinished(self, request_id: str) -> bool:
        """As `Engine.is_unfinished`."""
        return request_id in self._given or any(output.request_id == request_id for output in self._unsaid)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        live_text: bool = False,
    ) -> RequestOutput:
        """As `Engine.add_request`, on one of the replicas."""
        if request_id in self._given:
            raise RequestError(f"request id {request_id!r} is in use")
        text, ids = self.engines[0].prompt_ids(prompt)
        full: list[int] = []
        while True:
            given = self._placing.give(ids, params, cache_salt, without=full)
            try:
                output = self.at_rest(given.replica).add_request(
                    request_id,
                    {"prompt": text, "prompt_token_ids": ids},
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    live_text=live_text,
                )
            except Exception as error:
                given.ended()
                full.append(given.replica)
                if not isinstance(error, RequestError) or not error.retry or not self._placing.any_open(full):
                    raise
                continue
            self._given[request_id] = given
            return output

    def abort(self, request_id: str) -> RequestOutput | None:
        """As `Engine.abort`."""
        given = self._given.pop(request_id, None)
        if given is None:
            return None
        given.ended()
        return self.at_rest(given.replica).abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Waits until an engine has completed a step; returns the outputs that changed, as `Engine.step` does."""
        for replica, engine in enumerate(self.engines):
            if replica not in self._steps and engine.busy:
                self._steps[replica] = self._pool.submit(engine.step)
        if self._steps and not self._unsaid:
            wait(self._steps.values(), return_when=FIRST_COMPLETED)
            for replica in [replica for replica, step in self._steps.items() if step.done()]:
                self.at_rest(replica)
        unsaid, self._unsaid = self._unsaid, []
        return unsaid

    def close(self) -> None:
        """As `Engine.close`."""
        list(self._pool.map(Engine.close, list(self.all_at_rest())))
        self._pool.shutdown()

    def at_rest(self, replica: int) -> Engine:
        """A replica, between two of its steps."""
        step = self._steps.pop(replica, None)
        for output in step.result() if step is not None else ():
            given = self._given.get(output.request_id)
            if given is not None and any(choice.token_ids for choice in output.outputs):
                given.computed()
            if given is not None and output.finished:
                self._given.pop(output.request_id).ended()
            self._unsaid.append(output)
        return self.engines[replica]

    def all_at_rest(self) -> Iterator[Engine]:
        """Each replica, between two of its steps."""
        return (self.at_rest(replica) for replica in range(len(self.engines)))


class GroupControl:
    """`Control` for all engines of a group."""

    def __init__(self, group: EngineGroup) -> None:
        self._group = group

    @property
    def why_held(self) -> str | None:
        """One line for a user; None if no engine is held."""
        return next((engine.control.why_held for engine in self._group.engines if engine.control.held), None)

    @property
    def paused(self) -> bool:
        """Whether all engines are paused."""
        return all(engine.control.paused for engine in self._group.engines)

    def pause(self, mode: PauseMode = "abort") -> None:
        """As `Control.pause`."""
        for engine in self._group.all_at_rest():
            engine.control.pause(mode)

    def resume(self) -> None:
        """As `Control.resume`."""
        for engine in self._group.all_at_rest():
            engine.control.resume()

    def update_weights(self, given: NewWeights, *, version: str | int | None = None, partial: bool = False) -> str:
        """As `Control.update_weights`, with the same version on all engines."""
        update = Update.of([engine.control.weights for engine in self._group.engines], version)
        again = repeatable(given)
        for engine, lacks in zip(self._group.all_at_rest(), update.lacking, strict=True):
            if lacks:
                engine.control.update_weights(again, version=update.version, partial=partial)
        return update.version

    def sleep(self, level: int = 1) -> None:
        """As `Control.sleep`."""
        for engine in self._group.all_at_rest():
            engine.control.sleep(level)

    def wake_up(self) -> None:
        """As `Control.wake_up`."""
        for engine in self._group.all_at_rest():
            engine.control.wake_up()
