"""Made-up workers that publish their states as events, and a router's view of them."""

import asyncio
import json

import httpx

from serving.core.cache.content import Chain, Scope, State, state_name
from serving.core.tiers.journal import Journal
from serving.split.http.events import follow
from serving.split.router.event_followers import EventFollowers
from tests.support.servers.fake_workers import fleet_of, pieces

B = 4
PROMPT = list(range(11))


def state_of(tokens, salt=None, weights=0) -> State:
    links = Chain(Scope(salt, weights), B).reach(tokens)
    tail = len(tokens) % B
    return State(state_name(links[-1], tokens[len(tokens) - tail :]), links[-1], tail, len(tokens))


class Servers:
    """Workers that publish their journals, and tokenize what they are given: a letter a token."""

    def __init__(self, **journals) -> None:
        self.journals, self.asked, self.streams = journals, [], {}
        self.ending: set[str] = set()
        self.tokens = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
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
        if path.startswith("/v1/"):
            return httpx.Response(200, content=pieces(json.dumps({"from": host}).encode()))
        return httpx.Response(404)


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def run(servers, test, decode=("a", "b", "c"), **options):
    """`test(fleet, following)` while all streams are followed."""

    async def all_of_it():
        fleet = fleet_of(servers, decode, **options)
        following = EventFollowers(fleet)
        task = asyncio.create_task(following.follow(0.05))
        try:
            await test(fleet, following)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(all_of_it())
