"""Workers behind a router that exist only as answers of an HTTP client."""

import asyncio
import json

import httpx

from serving.split.router.client_request import ClientRequest
from serving.split.router.relay import Relay
from serving.split.router.workers import Fleet
from serving.split.settings import RouterSettings
from serving.split.wire import Ticket

TICKET = Ticket(id="t", worker="http://p1", handoff="full", prompt_token_ids=[1, 2], position=2, lease=9.0)
BODY = {"model": "m", "prompt": "some text", "max_tokens": 4}


async def pieces(*given):
    for piece in given:
        yield piece


class Workers:
    """Answers for all of them, and what they were asked."""

    def __init__(self, **broken):
        self.broken, self.asked = broken, []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        answer = self.broken.get(host)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict) and path in answer:
            found = answer[path]
            if isinstance(found, Exception):
                raise found
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


def relay(workers, prefill=("p1", "p2"), decode=("d1", "d2"), **settings):
    client = httpx.AsyncClient(transport=httpx.MockTransport(workers))
    fleet = Fleet.of([f"http://{name}" for name in prefill], [f"http://{name}" for name in decode], client)
    return Relay(fleet, RouterSettings.create(decode=("http://d1",), **settings))


def asked(kind, body):
    return ClientRequest(kind, json.dumps(body).encode(), body, {})


def ask(over, body=BODY):
    async def run():
        answer = await over.answer(asked("completions", body))
        return answer.status, b"".join([piece async for piece in answer.body])

    return asyncio.run(run())
