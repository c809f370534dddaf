"""The end of a server while requests run: every client is told, also where a step hangs."""

import asyncio
import logging
import threading
import time

import httpx

from tests.support.servers import live_server
from tests.support.servers.live_server import last_error

BODY = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


async def test_a_step_that_hangs_does_not_hold_up_the_end(server, monkeypatch):
    """Streams get an error event, other requests 503, and the server ends, though its engine does not."""
    engine = server.other_engine()
    step, hangs, hung, go_on = engine.step, threading.Event(), threading.Event(), threading.Event()

    def hanging():
        if hangs.is_set():
            hung.set()
            go_on.wait(120)
        return step()

    engine.step = hanging
    monkeypatch.setattr(live_server, "STEP_TIMEOUT", 0.5)
    other = server.other_server(engine=engine, drain_timeout=0.2)
    try:
        async with httpx.AsyncClient(base_url=other.url, timeout=60) as client:
            async with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                hangs.set()
                await asyncio.to_thread(hung.wait, 60)
                # The engine's thread does not get to this request: it is queued, and fails without having run.
                late = asyncio.create_task(client.post("/v1/completions", json=BODY))
                while other.async_engine.threads[0]._commands.empty():
                    await asyncio.sleep(0.01)
                other.uvicorn.should_exit = True
                text = "\n".join([line async for line in lines])
            assert (await late).status_code == 503
        other.thread.join(60)
        assert not other.thread.is_alive()
        assert other.async_engine.abandoned
        assert last_error(text)["code"] == "engine_stopped"
    finally:
        go_on.set()


async def test_the_end_tells_everybody(server, caplog):
    """What still runs when the time to drain is over: an error event, or 503, and no traceback in the log."""
    engine = server.other_engine()
    step = engine.step

    def slowly():
        time.sleep(0.03)
        return step()

    engine.step = slowly
    other = server.other_server(engine=engine, drain_timeout=0.5)
    limits = httpx.Limits(max_connections=None)
    with caplog.at_level(logging.WARNING):
        async with httpx.AsyncClient(base_url=other.url, timeout=60, limits=limits) as client:
            bodies = [BODY | {"stream": i % 3 > 0} for i in range(30)]
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
            while engine.loop.stats.steps < 15:
                await asyncio.sleep(0.01)
            other.uvicorn.should_exit = True
            answers = await asyncio.gather(*tasks)
        other.thread.join(60)
    assert not other.thread.is_alive()
    streams = [answer for answer in answers if answer.status_code == 200]
    assert 0 < len(streams) < 30
    for answer in streams:
        assert last_error(answer.text)["type"] == "unavailable_error"
    for answer in answers:
        assert answer.status_code in (200, 503), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "engine_stopped"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
