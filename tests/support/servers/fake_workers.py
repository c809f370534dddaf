"""Workers behind a router that exist only as answers of an HTTP client."""

import asyncio
import json

import httpx

from serving.api.http.protocol.completions import CompletionRequest
from serving.split.router.app import create_router
from serving.split.router.placement import ClientRequest
from serving.split.router.relay import Relay
from serving.split.router.workers import Fleet
from serving.split.settings import RouterSettings
from serving.split.wire import Ticket

TICKET = Ticket(id="t", worker="http://p1", handoff="full", prompt_token_ids=[1, 2], position=2, lease=9.0)
BODY = {"model": "m", "prompt": "some text", "max_tokens": 4}


async def pieces(*given):
    for piece in given:
        yield piece


async def all_of(body):
    return [piece async for piece in body]


class Workers:
    """Answers for all of them, and what they were asked.

    `broken`: by host, an exception, or by path a response, an exception or a coroutine function of the request.
    """

    def __init__(self, **broken):
        self.broken, self.asked = broken, []
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        self.requests.append(request)
        found = self.broken.get(host)
        found = found.get(path) if isinstance(found, dict) else found
        if isinstance(found, Exception):
            raise found
        if callable(found):
            return await found(request)
        if found is not None:
            return found
        if path == "/split/prefill":
            return httpx.Response(200, json=TICKET.model_copy(update={"worker": f"http://{host}"}).model_dump())
        if path.startswith("/v1/"):
            if json.loads(request.content).get("stream"):
                return httpx.Response(200, content=pieces(b"data: 1\n\n", b"data: [DONE]\n\n"))
            return httpx.Response(200, content=pieces(json.dumps({"from": host}).encode()))
        return httpx.Response(200, json={"accepted": True})

    def paths(self, start):
        return [(host, path) for host, path in self.asked if path.startswith(start)]


def fleet_of(workers, decode, prefill=(), **settings):
    client = httpx.AsyncClient(transport=httpx.MockTransport(workers))
    urls = {
        role: tuple(f"http://{name}" for name in names) for role, names in (("prefill", prefill), ("decode", decode))
    }
    return Fleet(RouterSettings.create(**urls, **settings), client)


def relay(workers, prefill=("p1", "p2"), decode=("d1", "d2"), **settings):
    return Relay(fleet_of(workers, decode, prefill, **settings))


def front(monkeypatch, workers, **settings):
    """A client of a router over these workers."""
    made = httpx.AsyncClient
    with monkeypatch.context() as patched:
        patched.setattr(httpx, "AsyncClient", lambda **_: made(transport=httpx.MockTransport(workers)))
        app = create_router(RouterSettings.create(decode=("http://d1",), **settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


def asked(kind, body):
    continued = CompletionRequest(**body).num_continued if kind == "completions" else 1
    return ClientRequest(kind, json.dumps(body).encode(), body, {}, continued)


def ask(over, body=BODY):
    async def run():
        answer = await over.answer(asked("completions", body))
        return answer.status, b"".join(await all_of(answer.body))

    return asyncio.run(run())
