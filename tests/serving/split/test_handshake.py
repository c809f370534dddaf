"""The handshake over HTTP: a worker that does not fit is refused with one line on both sides."""

import asyncio
import logging
import socket
from functools import partial
from types import SimpleNamespace
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI

from serving.api.http import errors
from serving.api.http.limits import Limits
from serving.api.http.settings import RequestBounds, ServerSettings
from serving.api.metrics import Metrics
from serving.split.http.peer import HttpPeer, error_of
from serving.split.http.routes import worker_router
from serving.split.settings import SplitSettings
from serving.split.wire import ManifestMismatch, SplitError, StateRequest, Ticket
from tests.serving.split.test_manifest import BASE, other
from tests.support.servers.listener import listener
from tests.support.servers.live_server import running


def prefill_app():
    """A prefill side that has a manifest and no engine."""

    async def call(function):
        return function(None)

    error = SplitError("state x does not exist or was dropped")
    worker = SimpleNamespace(manifest=BASE, close=lambda: None)
    side = SimpleNamespace(kept=0, worker=worker, sweep=lambda: 0, offer=mock.Mock(side_effect=error))
    app = FastAPI()
    errors.install(app)
    app.include_router(worker_router(worker, SplitSettings(), offers=side))
    app.state.context = SimpleNamespace(engine=SimpleNamespace(call=call, tell=lambda function: function(None)))
    return app


@pytest.fixture(scope="module")
def url():
    with running(prefill_app(), ServerSettings.create()) as (_, url):
        yield url


WANT = StateRequest(id="x", start=0, unit=16, layers=1, transport="tcp", manifest=BASE.digest)


async def test_hands_are_shaken(url):
    peer = await HttpPeer.connect(url, other(page_size=16))
    assert peer.manifest == BASE
    with pytest.raises(SplitError, match="state x does not exist"):
        await asyncio.to_thread(peer.offer, WANT, 5.0)
    await asyncio.to_thread(peer.release, "x", wanted=False)  # never raises
    await peer.close()


@pytest.mark.parametrize("fields", [{"ssm_dtype": "bfloat16"}, {"model": "another"}])
def test_a_mismatch_is_one_line_on_both_sides(url, fields, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ManifestMismatch) as caught:
        asyncio.run(HttpPeer.connect(url, other(**fields)))
    (name,) = fields
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    (record,) = [each for each in caplog.records if "refused" in each.getMessage()]
    assert name in record.getMessage()
    assert "\n" not in record.getMessage()


async def test_states_are_fetched_from_allowed_workers_only(url):
    """The decode worker connects only to allowed workers, so that only these get the fleet's key."""
    heard = {"unknown": b"", "allowed": b""}

    def hear(name, connection):
        heard[name] += connection.recv(1 << 16)
        connection.close()

    async def expect(client, worker):
        ticket = Ticket(id="t", worker=worker, handoff="full", prompt_token_ids=[1], position=1)
        answer = await client.post("/split/expect", json=ticket.model_dump())
        return answer.status_code, answer.json()

    app = FastAPI()
    errors.install(app)
    worker = SimpleNamespace(manifest=other(page_size=16), close=lambda: None)
    side = SimpleNamespace(renew=None, worker=worker, accept=lambda peer, ticket: None)
    with listener(partial(hear, "unknown")) as unknown, listener(partial(hear, "allowed")) as allowed:
        unknown, allowed = (f"http://127.0.0.1:{port}" for port in (unknown, allowed))
        known = SplitSettings(peer=(url + "/", allowed), fetch_timeout=5.0)
        app.include_router(worker_router(worker, known, decodes=side, keys=["the fleet's"]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://decode") as client:
            status, body = await expect(client, unknown)
            assert (status, body["error"]["code"]) == (403, "peer_not_allowed")
            assert await expect(client, url) == (200, {"accepted": False})
            status, body = await expect(client, allowed)
            assert (status, body["error"]["code"]) == (503, "peer_unreachable")
    assert not heard["unknown"]
    assert b"the fleet's" in heard["allowed"]


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b'{"error": {"message": "m", "type": null, "param": 3, "code": "x"}}', "m", "x"),
        (b'{"error": {"message": "m"}}', "m", None),
        (b'{"error": {"message": null}}', "status 503", None),
        *((content, "status 503", None) for content in (b'{"error": "m"}', b"[]", b"\xff", b"[" * 100_000)),
    ],
)
def test_errors_of_other_servers(content, message, code):
    error = error_of(503, content)
    assert (error.message, error.code) == (message, code)


def test_an_unreachable_worker():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen
        with pytest.raises(SplitError, match="is unreachable"):
            asyncio.run(HttpPeer.connect(f"http://127.0.0.1:{bound.getsockname()[1]}", BASE))


async def test_a_worker_that_shuts_down_hands_out_the_states_that_it_holds():
    """It computes and promises nothing new; decode workers still fetch what their requests wait for."""
    app = prefill_app()
    app.add_middleware(Limits, bounds=RequestBounds(log_requests=False), metrics=Metrics("worker"))
    app.state.ending = lambda: True
    messages = ("offer", WANT.model_dump(), "state_gone"), ("share", {"tokens": [1]}, "shutting_down")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://prefill") as client:
        for path, body, code in messages:
            answer = await client.post(f"/split/{path}", json=body)
            assert answer.json()["error"]["code"] == code
