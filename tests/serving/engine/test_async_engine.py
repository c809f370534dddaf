"""Streams for many tasks at once: equal to the engine's own outputs, aborted when their reader goes."""

import asyncio
import random

import pytest

from serving import AsyncEngine, RequestError, SamplingParams
from serving.engine.engine_thread import EngineStopped
from tests.support.engines.engines import finish

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(harness):
    rng = random.Random(4)
    return [{"prompt_token_ids": harness.prompt(rng, rng.randrange(1, 60))} for _ in range(12)]


def run(harness, body):
    """Runs a coroutine function over a fresh async engine, then checks that nothing is left in use."""
    engine = harness.engine("all")
    served = AsyncEngine(engine)
    try:
        asyncio.run(body(served))
    finally:
        served.shutdown()
    finish(engine)
    engine.loop.scheduler.check(idle=True)
    assert engine.num_unfinished == 0


def test_leaving_early_aborts(harness, prompts):
    long = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)

    async def body(served):
        stream = served.generate(prompts[0], long, "left")
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(anext(served.generate(prompts[1], long, "cancelled")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if not await served.call(lambda engine: engine.num_unfinished):
                break
            await asyncio.sleep(0.01)
        assert await served.call(lambda engine: engine.num_unfinished) == 0

    run(harness, body)


def test_the_numbers_have_whatever_has_been_answered(harness, prompts):
    async def body(served):
        for count in range(1, 20):
            async for output in served.generate(prompts[0], GREEDY):
                if output.finished:
                    assert served.latest_stats["finished"]["length"] == count

    run(harness, body)


def test_aborted_by_name(harness, prompts):
    async def body(served):
        outputs = []
        async for output in served.generate(prompts[0], SamplingParams(max_tokens=90, ignore_eos=True), "named"):
            outputs.append(output)
            await served.abort("named")
        assert outputs[-1].outputs[0].finish_reason in ("abort", "length")

    run(harness, body)


def test_errors_reach_the_caller(harness):
    async def body(served):
        with pytest.raises(RequestError, match="not in the vocabulary"):
            await anext(served.generate({"prompt_token_ids": [10**6]}, GREEDY))

    run(harness, body)


def test_a_failed_engine_says_so(harness, prompts):
    engine = harness.engine("all")

    def fault(plan):
        raise RuntimeError("device lost")

    engine.loop.fault = fault
    served = AsyncEngine(engine)

    async def body():
        with pytest.raises(EngineStopped, match="device lost"):
            await anext(served.generate(prompts[0], GREEDY))
        with pytest.raises(EngineStopped):
            await anext(served.generate(prompts[0], GREEDY))

    asyncio.run(body())
    served.shutdown()
