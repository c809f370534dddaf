"""Workers behind a router that exist only as answers of an HTTP client, and a router's view of their states."""

import asyncio
import contextlib
import json

import httpx

from serving.api.http.protocol.completions import CompletionRequest
from serving.core.cache.content import Chain, Scope, State, state_name
from serving.core.tiers.journal import Journal
from serving.split.http.events import follow
from serving.split.router.app import create_router
from serving.split.router.event_followers import EventFollowers
from serving.split.router.placement import ClientRequest
from serving.split.router.relay import Relay
from serving.split.router.workers import Fleet
from serving.split.settings import RouterSettings
from serving.split.wire import Ticket

TICKET = Ticket(id="t", worker="http://p1", handoff="full", prompt_token_ids=[1, 2], position=2, lease=9.0)
BODY = {"model": "m", "prompt": "some text", "max_tokens": 4}
B = 4
PROMPT = list(range(11))


def state_of(tokens, salt=None, weights=0) -> State:
    links = Chain(Scope(salt, weights), B).reach(tokens)
    tail = len(tokens) % B
    return State(state_name(links[-1], tokens[len(tokens) - tail :]), links[-1], tail, len(tokens))


async def pieces(*given):
    for piece in given:
        yield piece


async def then_silent(piece):
    yield piece
    await asyncio.sleep(60)


async def all_of(body):
    return [piece async for piece in body]


def slow(seconds):
    """An answer of a worker that takes its time."""

    async def answer(request):
        await asyncio.sleep(seconds)
        return httpx.Response(200, json={})

    return answer


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
        return await self.respond(host, path, request) if found is None else found

    async def respond(self, host, path, request):
        """The answer of one that is not broken."""
        if path == "/split/prefill":
            return httpx.Response(200, json=TICKET.model_copy(update={"worker": f"http://{host}"}).model_dump())
        if path.startswith("/v1/"):
            if json.loads(request.content).get("stream"):
                return httpx.Response(200, content=pieces(b"data: 1\n\n", b"data: [DONE]\n\n"))
            return httpx.Response(200, content=pieces(json.dumps({"from": host}).encode()))
        return httpx.Response(200, json={"accepted": True})

    def paths(self, start):
        return [(host, path) for host, path in self.asked if path.startswith(start)]


class Servers(Workers):
    """Workers that publish their journals, and tokenize what they are given: a letter a token."""

    def __init__(self, **journals) -> None:
        super().__init__()
        self.journals, self.streams = journals, {}
        self.ending: set[str] = set()
        self.tokens = None

    async def respond(self, host, path, request):
        if path == "/internal/events" and host in self.journals:
            self.streams[host] = self.streams.get(host, 0) + 1
            told = self.journals[host]
            if isinstance(told, Journal):
                told = follow(told, "digest", lambda: host in self.ending)
            return httpx.Response(200, content=told)
        if path == "/internal/tokens":
            if self.tokens is not None:
                return await self.tokens()
            body = json.loads(request.content)["body"]
            prompt = [ord(each) if isinstance(each, str) else each for each in body["prompt"]]
            return httpx.Response(200, json={"tokens": prompt, "salt": body.get("cache_salt")})
        return await super().respond(host, path, request) if path.startswith("/v1/") else httpx.Response(404)


def fleet_of(workers, decode, prefill=(), **settings):
    client = httpx.AsyncClient(transport=httpx.MockTransport(workers))
    prefill, decode = (tuple(f"http://{name}" for name in names) for names in (prefill, decode))
    return Fleet(RouterSettings.create(prefill=prefill, decode=decode, **settings), client)


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


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def followed(servers, decode=("a", "b", "c"), **options):
    """A fleet, and its streams, all of which are followed in the context."""
    fleet = fleet_of(servers, decode, **options)
    following = EventFollowers(fleet)
    task = asyncio.create_task(following.follow(0.05))
    try:
        yield fleet, following
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
