"""Replicas behind one front: the tokens of one engine, requests where their states are, errors that stay local."""

import asyncio
import random
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from serving import AsyncEngine, RequestError, SamplingParams
from serving.engine.engine_thread import EngineStopped
from serving.engine.replicas import ReplicaGroup, ReplicaLoads
from serving.engine.requests.request import EngineRequest
from tests.support.engines.replicas import admitted, check_idle, run_group, serving

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def traffic(harness):
    """Prompts, some of which share beginnings, and what one engine says to each alone."""
    rng = random.Random(11)
    shared = [harness.prompt(rng, 48) for _ in range(2)]
    prompts = [harness.prompt(rng, rng.choice([1, 7, 16, 31, 33, 48, 64, 65, 90])) for _ in range(6)]
    prompts += [rng.choice(shared) + harness.prompt(rng, rng.randrange(1, 30)) for _ in range(6)]
    engine = harness.engine("none")
    return prompts, [harness.run(engine, [prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]


async def last(replicas, prompt, params=GREEDY, **more):
    return [output async for output in replicas.generate({"prompt_token_ids": prompt}, params, **more)][-1]


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["all", "none", "align"])
def test_replicas_say_what_one_engine_says(harness, maker, traffic, mode):
    prompts, alone = traffic
    engines = maker.make(mode)
    group = ReplicaGroup(engines)
    for second in (False, True):
        outputs = run_group(group, [EngineRequest(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)])
        for prompt, tokens, output in zip(prompts, alone, outputs, strict=True):
            harness.assert_greedy(prompt, tokens, output.outputs[0].token_ids)
        if second:
            assert (sum(output.num_cached_tokens for output in outputs) > 0) == (mode != "none")
    group.close()
    check_idle(engines)
    assert min(admitted(engines)) >= len(prompts) // 2
    assert [{device.id for device in engine.loop.programs.devices} for engine in engines] == [{0}, {1}]


async def test_a_prompt_goes_where_its_state_is(harness, maker):
    rng = random.Random(1)
    talks = [harness.prompt(rng, 64) for _ in range(4)]
    engines = maker.make()
    async with serving(engines) as replicas:
        for talk in talks:  # one at a time: by load alone, all would go to the first
            await last(replicas, talk)
        for talk in talks * 2:
            again = await last(replicas, talk + harness.prompt(rng, 9))
            assert again.num_cached_tokens == 64
        fresh = await last(replicas, talks[0], cache_salt="other")
        assert fresh.num_cached_tokens == 0
        scores = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        assert len((await last(replicas, talks[0], scores)).prompt_logprobs) == 64
    assert min(admitted(engines)) >= 4


async def test_choices_of_a_request_stay_together(harness, maker):
    params = SamplingParams(n=3, temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = harness.prompt(random.Random(3), 40)
    engines = maker.make()
    async with serving(engines) as replicas:
        outputs = await asyncio.gather(last(replicas, prompt, params), last(replicas, prompt[::-1], params))
        (alone,) = harness.run(harness.engine("all"), [prompt], params)
        assert [c.token_ids for c in outputs[0].outputs] == [c.token_ids for c in alone.outputs]
    assert admitted(engines) == [3, 3]


def test_requests_without_a_seed_draw_differently(maker):
    seeds = []
    for engine in maker.make():
        engine.add_request("r", {"prompt_token_ids": [5]}, SamplingParams())
        seeds += [request.user.seed for request in engine.loop.scheduler.queues.waiting]
        engine.abort("r")
    assert len(set(seeds)) == 2


async def test_aborts_and_readers_that_leave(harness, maker):
    rng, gate = random.Random(5), threading.Event()
    long = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    async with serving(maker.make()) as replicas:
        streams = [replicas.generate({"prompt_token_ids": harness.prompt(rng, 20)}, long, x) for x in ("one", "two")]
        await anext(streams[0])
        # The second replica may have to compile its programs: the first request must not finish meanwhile.
        replicas.threads[0].tell(lambda _: gate.wait(60))
        await anext(streams[1])
        assert [served.num_unfinished for served in replicas.engines] == [1, 1]
        with pytest.raises(RequestError, match="'one' is in use"):
            await last(replicas, [5], request_id="one")
        await replicas.abort("two")
        await replicas.abort("unknown")
        assert [output.outputs[0].finish_reason async for output in streams[1]][-1] == "abort"
        gate.set()
        await streams[0].aclose()
        task = asyncio.create_task(anext(replicas.generate({"prompt_token_ids": [5, 6, 7]}, long, "cancelled")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if not replicas.num_unfinished:
                break
            await asyncio.sleep(0.01)
        assert not replicas.num_unfinished
        assert (await last(replicas, [5, 6], request_id="one")).finished


async def test_the_numbers_have_whatever_has_been_answered(harness, maker):
    prompt = harness.prompt(random.Random(4), 20)
    async with serving(maker.make(replicas=1)) as replica:
        for count in range(1, 10):
            assert (await last(replica, prompt)).finished
            assert replica.latest_stats["finished"]["length"] == count


def test_no_request_waits_at_a_held_replica():
    held, running = (SimpleNamespace(control=SimpleNamespace(held=held)) for held in (True, False))
    error, loads = RequestError("the queue is full", retry=True), ReplicaLoads([held, running])
    assert loads.tries_another(error, [0])
    assert not loads.tries_another(error, [1])
    assert not loads.tries_another(RequestError("the prompt is empty"), [0])


async def test_what_one_has_failed_at_stops_all(harness, maker):
    """As with one engine: the process says so, and is to be started again."""
    engines = maker.make()
    rng = random.Random(7)
    async with serving(engines, sound=1) as replicas:
        long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        one = asyncio.create_task(last(replicas, harness.prompt(rng, 20), long))
        await asyncio.sleep(0.05)
        engines[1].loop.fault = Mock(side_effect=TypeError("planted"))
        with pytest.raises(EngineStopped, match="planted"):
            await last(replicas, harness.prompt(rng, 20))
        assert not replicas.running
        assert (await one).finished


def test_a_hanging_replica_does_not_stop_the_other(harness, maker):
    engines = maker.make()
    rng, gate = random.Random(13), threading.Event()

    async def body(replicas):
        replicas.threads[1].tell(lambda _: gate.wait(300))
        tasks = [asyncio.create_task(last(replicas, harness.prompt(rng, 20))) for _ in range(2)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().finished for task in done] == [True]
        assert not await asyncio.to_thread(replicas.shutdown, 0.1)
        assert replicas.abandoned
        with pytest.raises(EngineStopped, match="has not ended"):
            await waiting.pop()

    replicas = AsyncEngine(engines)
    try:
        asyncio.run(body(replicas))
    finally:
        gate.set()
        for thread in replicas.threads:
            thread._thread.join(60)
    check_idle(engines)


async def test_held_replicas_are_passed_over(harness, maker):
    engines = maker.make()
    rng = random.Random(8)
    async with serving(engines) as replicas:
        replicas.threads[0].call(lambda engine: engine.control.sleep(1)).result()
        for _ in range(3):
            await last(replicas, harness.prompt(rng, 20))
        assert replicas.latest_stats["held"] is not None
        await replicas.call_all(lambda engine: engine.control.wake_up())
    assert admitted(engines) == [0, 3]


@pytest.mark.full
async def test_new_weights_come_to_all_under_one_version(harness, maker, monkeypatch):
    engines = maker.make(fresh=True)
    first = engines[0].loop.programs.weights
    prompt = harness.prompt(random.Random(10), 40)
    async with serving(engines) as replicas:

        async def both():
            outputs = await asyncio.gather(last(replicas, prompt), last(replicas, prompt, cache_salt="b"))
            assert replicas.num_unfinished == 0
            return [(output.outputs[0].token_ids, output.outputs[0].weights_versions) for output in outputs]

        before = await both()
        assert before[0] == before[1]
        changed = {path: value * 1.3 + 0.01 for path, value in first.items()}
        second = {path: value * 1.1 for path, value in first.items()}
        await replicas.pause("keep")
        assert all(engine.control.paused for engine in engines)
        await replicas.update_weights(changed, version=None, partial=False)
        await replicas.call_all(lambda engine: engine.control.resume())
        after = await both()
        assert after[0] == after[1]
        assert after[0][1] == [("1", 8)]
        assert after[0][0] != before[0][0]
        with pytest.raises(RequestError):
            await replicas.update_weights({"nothing": changed["embed.weight"]}, version=None, partial=False)
        # One alone goes ahead; the next update brings both together again.
        lineage = engines[0].control.weights.lineage
        assert engines[1].control.weights.lineage == lineage != 0
        replicas.threads[1].call(lambda engine: engine.control.update_weights(second)).result()
        assert engines[0].control.weights.lineage == lineage != engines[1].control.weights.lineage
        await replicas.update_weights(iter(first.items()), version=None, partial=False)
        assert await both() == [(before[0][0], [("3", 8)])] * 2
        # What fails on one may be asked for again by the same name.
        fails = Mock(side_effect=RuntimeError("planted"))
        monkeypatch.setattr(engines[1].loop.programs, "replace_weight", fails)
        with pytest.raises(RuntimeError, match="planted"):
            await replicas.update_weights(changed, version="four", partial=False)
        assert [engine.control.held for engine in engines] == [False, True]
        monkeypatch.undo()
        await replicas.update_weights(changed, version="four", partial=False)
        assert not any(engine.control.held for engine in engines)
        assert await both() == [(after[0][0], [("four", 8)])] * 2
        with pytest.raises(RequestError, match="in use"):
            await replicas.update_weights(changed, version="four", partial=False)
    assert admitted(engines) == [4, 4]
