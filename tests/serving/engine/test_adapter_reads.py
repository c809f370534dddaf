"""Adapters' files are read in threads of their own, with a deadline, and no client takes the time of others."""

import asyncio
import threading
import time

import pytest

from serving import LoRARequest, RequestError, SamplingParams
from serving.engine.requests import adapter_reads
from serving.engine.requests.adapter_reads import AdapterReads
from tests.support.engines.replicas import serving
from tests.support.models.adapter_contents import content


def reading(order, name):
    return lambda: order.append(name) or name


async def test_a_client_pauses_between_reads_while_others_have_requests(monkeypatch):
    monkeypatch.setattr(adapter_reads, "LEAST_SECONDS", 0.04)

    async def run(others):
        reads, order = AdapterReads(), []
        reads.seen("many")
        if others:
            reads.seen("few")
        begin = time.monotonic()
        clients = ["many"] * 3 + ["few"]
        await asyncio.gather(*(reads.in_turn(client, reading(order, client), lambda: False) for client in clients))
        assert not reads._turns
        return time.monotonic() - begin, order

    seconds, order = await run(others=True)
    assert seconds > 2 * 0.04 / adapter_reads.CLIENT_SHARE
    assert order.index("few") < 2
    assert (await run(others=False))[0] < seconds


async def test_requests_for_one_adapter_need_one_read():
    loaded = threading.Event()
    reads, order = AdapterReads(), []

    async def one():
        found = await reads.in_turn("a", reading(order, "read"), loaded.is_set)
        loaded.set()
        return found

    results = await asyncio.gather(*(one() for _ in range(5)))
    assert results == ["read", *[None] * 4]
    assert order == ["read"]


async def test_reads_that_do_not_end_have_a_deadline_and_a_bound(monkeypatch):
    monkeypatch.setattr(adapter_reads, "READ_SECONDS", 0.05)
    monkeypatch.setattr(adapter_reads, "MAX_THREADS", 2)
    end = threading.Event()
    reads = AdapterReads()
    for _ in range(2):
        with pytest.raises(RequestError, match="could not be read in 0 s"):
            await reads.read(end.wait)
    with pytest.raises(RequestError, match="2 reads of files do not end"):
        await reads.read(end.wait)
    await asyncio.to_thread(int)  # the threads of others are free
    end.set()


async def test_an_evicted_adapter_is_read_in_another_thread(harness, maker):
    (engine,), threads = maker.make(replicas=1, enable_lora=True, max_loras=1, max_lora_rank=4), []

    def read(name, path):
        threads.append(threading.current_thread().name)
        return engine.adapters.checked(name, path, content(harness.model, int(path)))

    engine.adapters.read = read
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    async with serving(engine) as served:

        async def tokens(number):
            adapter = LoRARequest(f"tenant {number}", 0, str(number))
            async for output in served.generate([3, 1, 4], greedy, lora_request=adapter, live=False):
                return output.outputs[0].token_ids

        first = await tokens(0)
        assert await tokens(1) != first
        assert await tokens(0) == first
    assert threads == ["adapter read"] * 3
