"""Adapters with several replicas: loaded on all or on none, and the same content under a name on each of them."""

import asyncio
from unittest.mock import Mock

import pytest

from serving import LoRARequest, RequestError, SamplingParams
from serving.engine.changes import load_adapter, table_of
from serving.engine.replicas import ReplicaGroup
from serving.engine.requests.request import EngineRequest
from tests.support.engines.engines import finish
from tests.support.engines.replicas import admitted, check_idle, run_group, serving
from tests.support.models.adapter_contents import read_contents

pytestmark = pytest.mark.full

FLAGS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "max_initial_states": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 5
REQUESTS = [None, *(LoRARequest(f"tenant {i}", 0, str(i)) for i in (0, 1))]


@pytest.fixture
def engines(harness, maker):
    return [read_contents(engine, harness.model) for engine in maker.make(**FLAGS)]


@pytest.fixture
def group(engines):
    group = ReplicaGroup(engines)
    yield group
    group.close()
    check_idle(engines)


def said(output):
    return output.outputs[0].token_ids


def run(group, adapters, salt=None):
    requests = [
        EngineRequest(f"{salt} {i}", PROMPT, GREEDY, cache_salt=salt, lora_request=adapter)
        for i, adapter in enumerate(adapters)
    ]
    return run_group(group, requests)


def load(group, name, number):
    load_adapter(name, str(number), table_of(group.engine).read(name, str(number)), group.call_each)


def test_each_replica_has_the_same_content_under_a_name(group, engines):
    expected = [said(run(group, [request], f"alone {i}")[0]) for i, request in enumerate(REQUESTS)]
    assert len(set(map(tuple, expected))) == len(expected)
    load(group, "tenant 0", 0)
    outputs = run(group, REQUESTS * 4, "together")
    assert [said(output) for output in outputs] == expected * 4
    assert min(admitted(engines)) > 3
    # Other content under the name is used by all replicas at once, and finds no state of the old content.
    load(group, "tenant 0", 1)
    moved = LoRARequest("tenant 0", 0, "1")
    outputs = run(group, [moved] * 6, "alone 1")
    assert [said(output) for output in outputs] == [expected[2]] * 6
    assert len({engine.adapters.loaded["tenant 0"] for engine in engines}) == 1
    group.call_each(lambda engine: table_of(engine).remove("tenant 0"))
    assert not any("tenant 0" in engine.adapters.loaded for engine in engines)


@pytest.mark.smoke
def test_an_adapter_is_loaded_on_all_replicas_or_on_none(group, engines):
    for number in (0, 1):
        load(group, f"tenant {number}", number)
    before = [engine.adapters.loaded for engine in engines]
    # Requests on the second replica use both of its entries.
    busy = [engines[1].adapters.take(request) for request in REQUESTS[1:]]
    for name in ("tenant 0", "other"):
        with pytest.raises(RequestError, match="unfinished requests use all 2 loaded adapters"):
            load(group, name, 2)
    assert [engine.adapters.loaded for engine in engines] == before
    assert not engines[0].adapters.usage["running"]
    assert engines[0].adapters.names["tenant 0"] == ("0", "content 0")
    for adapter in busy:
        engines[1].adapters.release(adapter)
    load(group, "tenant 0", 2)
    assert [engine.adapters.loaded["tenant 0"] for engine in engines] == ["content 2"] * 2


def test_a_failed_write_leaves_the_adapter_on_no_replica(group, engines, monkeypatch):
    load(group, "tenant 0", 0)
    fails = Mock(side_effect=RuntimeError("RESOURCE_EXHAUSTED: as a device reports it"))
    monkeypatch.setattr(engines[1].loop.programs, "replace_adapter", fails)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        load(group, "tenant 0", 1)
    monkeypatch.undo()
    assert not any("tenant 0" in engine.adapters.loaded for engine in engines)
    assert not any(engine.adapters.usage["running"] for engine in engines)
    load(group, "tenant 0", 1)
    assert len({tuple(said(output)) for output in run(group, [LoRARequest("tenant 0", 0, "1")] * 4)}) == 1


def test_a_request_goes_to_a_replica_with_a_free_entry(group, engines):
    busy = [engines[0].adapters.take(request) for request in REQUESTS[1:]]
    outputs = run(group, [LoRARequest("third", 0, "2")] * 3)
    assert len({tuple(said(output)) for output in outputs}) == 1
    assert admitted(engines) == [0, 3]
    for adapter in busy:
        engines[0].adapters.release(adapter)


@pytest.mark.smoke
async def test_concurrent_loads_have_the_same_order_on_all_replicas(engines):
    async with serving(engines) as replicas:
        await asyncio.gather(*(replicas.load_adapter("tenant", str(number % 3)) for number in range(12)))
        assert len({engine.adapters.loaded["tenant"] for engine in engines}) == 1
        await replicas.unload_adapter("tenant")
        assert not any(engine.adapters.loaded for engine in engines)


def test_a_prompt_goes_where_the_states_of_its_adapter_are(group, engines):
    for number in (0, 1):
        load(group, f"tenant {number}", number)
    first = EngineRequest("first", PROMPT, GREEDY, lora_request=REQUESTS[1])
    group.threads[1].call(lambda engine: (engine.add(first), finish(engine))).result()
    for adapter in (*REQUESTS, LoRARequest("unknown", 0, "2")):
        missing = group.loads.give(PROMPT, EngineRequest("next", PROMPT, lora_request=adapter)).missing
        assert missing == (0 if adapter is REQUESTS[1] else len(PROMPT))
