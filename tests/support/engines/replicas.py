"""Replicas of a tiny model, each on one of the CPU's devices, with programs that all of a session share."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from mamba_jax.programs import StepPrograms
from serving import AsyncEngine
from serving.config import EngineConfig
from serving.engine.assembly import build
from serving.engine.engine import Engine
from serving.engine.replicas import ReplicaGroup
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest
from tests.support.engines.engine_harness import FLAGS, EngineHarness
from tests.support.engines.engines import OPTIMIZED, QUICK_COMPILE
from tests.support.engines.step_programs import SharedPrograms, few_programs, shared_programs


class ReplicaMaker:
    """Makes replicas of a harness's model. Stores and schedulers are new each time; programs are compiled once.

    Steps have one shape for decoding and one for prefill.
    """

    def __init__(self, harness: EngineHarness) -> None:
        self.harness = harness
        self._programs: dict[Any, StepPrograms] = {}

    def make(self, mode: str | None = "all", replicas: int = 2, *, fresh: bool = False, **flags: Any) -> list[Engine]:
        """`fresh`: with programs of their own, so that their weights may be replaced."""
        config = EngineConfig.create(mamba_cache_mode=mode, data_parallel_size=replicas, **(FLAGS | flags))
        # Bits are promised for programs as users compile them.
        options = OPTIMIZED if config.schedule_invariant else QUICK_COMPILE
        make = functools.partial(SharedPrograms, greedy=True, compiler_options=options)
        with few_programs(make if fresh else self._shared):
            built = build.assemble(config, self.harness.model, tokenizer=self.harness.tokenizer, eos_token_ids=(2,))
        return list(built.engines)

    def _shared(self, model, *, mesh, source, adapters=None, **more) -> StepPrograms:
        key = mesh, source, adapters is not None
        if key not in self._programs:
            self._programs[key] = shared_programs(model, mesh=mesh, source=source, adapters=adapters, **more)
        return self._programs[key]


def run_group(group: ReplicaGroup, requests: list[EngineRequest]) -> list[RequestOutput]:
    """The finished outputs of requests, in order."""
    group.add_all(requests)
    outputs: dict[str, RequestOutput] = {}
    while group.num_unfinished:
        outputs |= {output.request_id: output for output in group.step()}
    return [outputs[request.request_id] for request in requests]


@contextlib.asynccontextmanager
async def serving(engines: Engine | list[Engine], *, sound: int | None = None) -> AsyncIterator[AsyncEngine]:
    """An `AsyncEngine`, which ends with the block. Nothing may be left in use on the first `sound` of the engines."""
    served = AsyncEngine(engines)
    try:
        yield served
    finally:
        await asyncio.to_thread(served.shutdown)
    check_idle(served.engines[:sound])


def check_idle(engines: list[Engine]) -> None:
    """Nothing is in use on any of them, and every slot and page is accounted for."""
    for engine in engines:
        while engine.loop.busy:
            engine.step()
        engine.loop.scheduler.check(idle=True)
        assert engine.num_unfinished == 0


def admitted(engines: list[Engine]) -> list[int]:
    """How many requests each has taken."""
    return [engine.loop.scheduler.stats()["requests"] for engine in engines]
