"""Several engines of one model, for a caller that steps them itself like one `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from serving.engine.engine import Engine
from serving.engine.replicas.replica_loads import Assignment, ReplicaLoads
from serving.engine.request_error import RequestError
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest, Prompt
from serving.engine.requests.sampling_params import SamplingParams


class EngineGroup:
    """Runs requests on several replicas with the methods of `Engine`. Each replica steps in a separate thread.

    Not thread-safe: one caller drives it. The caller uses an engine only between two of its steps.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._placing = ReplicaLoads(engines)
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="engine")
        self._steps: dict[int, Future[list[RequestOutput]]] = {}
        self._given: dict[str, Assignment] = {}
        """Unfinished requests and their replicas, by request id."""
        self._unsaid: list[RequestOutput] = []

    @property
    def max_model_len(self) -> int:
        """Same as `Engine.max_model_len`; equal for all replicas."""
        return self.engines[0].max_model_len

    @property
    def num_unfinished(self) -> int:
        """Number of requests for which `step` has not returned the finished output yet."""
        return len(self._given)

    def is_unfinished(self, request_id: str) -> bool:
        """Returns whether a request is unfinished; see `Engine.is_unfinished`."""
        return request_id in self._given or any(output.request_id == request_id for output in self._unsaid)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Adds a request like `add`; see `Engine.add_request`."""
        return self.add(EngineRequest(request_id, prompt, params or SamplingParams(), **options))

    def add(self, request: EngineRequest) -> RequestOutput:
        """Adds a request to one of the replicas; see `Engine.add`."""
        request_id = request.request_id
        if request_id in self._given:
            raise RequestError(f"request id {request_id!r} is in use")
        text, ids = self.engines[0].prompt_ids(request.prompt)
        request = replace(request, prompt={"prompt": text, "prompt_token_ids": ids})
        full: list[int] = []
        while True:
            given = self._placing.give(ids, request, without=full)
            try:
                output = self.at_rest(given.replica).add(request)
            except Exception as error:
                given.ended()
                full.append(given.replica)
                if not self._placing.tries_another(error, full):
                    raise
                continue
            self._given[request_id] = given
            return output

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; see `Engine.abort`."""
        given = self._given.pop(request_id, None)
        if given is None:
            return None
        given.ended()
        return self.at_rest(given.replica).abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Waits until an engine has completed a step. Returns the changed outputs like `Engine.step`."""
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
        """Closes all replicas; see `Engine.close`."""
        list(self._pool.map(Engine.close, self.call_all(lambda engine: engine)))
        self._pool.shutdown()

    def at_rest(self, replica: int) -> Engine:
        """Waits for the replica's step to end and returns the replica."""
        step = self._steps.pop(replica, None)
        for output in step.result() if step is not None else ():
            given = self._given.get(output.request_id)
            if given is not None and any(choice.token_ids for choice in output.outputs):
                given.computed()
            if given is not None and output.finished:
                self._given.pop(output.request_id).ended()
            self._unsaid.append(output)
        return self.engines[replica]

    def call_all(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with each replica between two of its steps; returns the results in the replicas' order."""
        return [function(self.at_rest(replica)) for replica in range(len(self.engines))]


def grouped(engines: Sequence[Engine]) -> Engine | EngineGroup:
    """Returns the object that runs requests on these replicas: their group, or the engine itself if there is one."""
    return engines[0] if len(engines) == 1 else EngineGroup(engines)
