"""Servers that publish routing events, and a router that follows them, over HTTP; their engines compute nothing."""

import contextlib
import json
import socket
import time

import httpx
import pytest

from checkpoints.load import load_model
from checkpoints.tokenizer import load_tokenizer
from serving.config import EngineConfig
from serving.core.tiers.journal import Journal
from serving.engine.assembly.build import assemble
from serving.split.http import events
from serving.split.http.events import events_router
from serving.split.http.peer import SealAuth
from serving.split.http.roles import open_role
from serving.split.router.app import create_router
from serving.split.router.workers import choose
from serving.split.seal import Seal
from serving.split.settings import RouterSettings, SplitSettings
from tests.support.engines.step_programs import NoPrograms
from tests.support.servers.live_server import ENGINE, LiveServer, running
from tests.support.waiting import comes_true

SECRET = "a secret of the fleet"
SEAL = Seal(SECRET)
TEXT = "The first words of a conversation that a client will continue later."
MORE = " More of it."
CHAT = [{"role": "user", "content": TEXT}]
OTHER_FORMS = {
    "/v1/chat/completions": ({"messages": CHAT, "max_tokens": 4}, '"finish_reason":"length"'),
    "/v1/responses": ({"input": TEXT, "instructions": "Be brief.", "max_output_tokens": 4}, '"status":"incomplete"'),
    "/v1/messages": ({"messages": CHAT, "system": "Be polite.", "max_tokens": 4}, '"stop_reason":"max_tokens"'),
}
"""By path: a request, and what its stream contains if the answer is as long as it may be. All prompts differ."""
PLAIN = {"speculative_method": None, "num_speculative_tokens": 0, "enable_structured_outputs": False}


@pytest.fixture(scope="module")
def demo():
    return load_model("demo", dtype="float32", progress=False), load_tokenizer("demo")


@pytest.fixture
def start(demo):
    """Starts servers that publish events, and closes them."""
    model, tokenizer = demo
    servers = []

    def make(role=None, **flags) -> LiveServer:
        config, journal = EngineConfig.create(**(ENGINE | PLAIN | flags)), None
        built = assemble(config, model, tokenizer=tokenizer, programs=NoPrograms())
        listening = socket.create_server(("127.0.0.1", 0))
        if role is None:
            journal = Journal(config.state_block_size)
            built.engine.loop.scheduler.tell(journal)
            routers = [events_router(journal, model="demo", seal=SEAL)]
        else:
            routers = open_role(role, built, "127.0.0.1", listening.getsockname()[1]).routers
        server = LiveServer(built.engine, routers=routers, prepare=False, listening=listening)
        server.journal = journal
        servers.append(server)
        server.wait_until_ready(60)
        return server

    yield make
    for server in servers:
        if server.thread.is_alive():
            server.close()


class Front:
    """A router in a thread, until `stack` is left."""

    def __init__(self, stack, servers, prefill=(), **settings) -> None:
        urls = {"decode": tuple(each.url for each in servers), "prefill": tuple(each.url for each in prefill)}
        chosen = RouterSettings.create(**urls, split_secret=SECRET, check_interval=0.1, **settings)
        app = create_router(chosen)
        self.relay = app.state.relay
        _, self.url = stack.enter_context(running(app, chosen, leave=self.relay.leave))

    def post(self, path, **body) -> dict:
        answer = httpx.post(self.url + path, json={"model": "demo", "max_tokens": 4} | body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self) -> dict:
        return httpx.get(f"{self.url}/status", timeout=60).json()

    def wait_until(self, condition, seconds=20.0) -> None:
        assert comes_true(lambda: condition(self.status()["states"]), seconds, 0.02), self.status()

    def wait_until_told(self, *servers) -> None:
        """Until it knows of as many states as the servers have."""
        self.wait_until(lambda states: states == {each.url: len(each.journal.snapshot().states) for each in servers})


@pytest.fixture
def front():
    with contextlib.ExitStack() as stack:
        yield lambda *servers, **settings: Front(stack, servers, **settings)


def stream(server):
    return httpx.stream("GET", f"{server.url}/internal/events", auth=SealAuth(SEAL), timeout=30)


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_unsigned_requests_are_refused(start):
    server = start()
    assert httpx.get(f"{server.url}/internal/events").status_code == 401
    answer = httpx.post(f"{server.url}/internal/tokens", json={"kind": "completions", "body": {"prompt": "a"}})
    assert answer.status_code == 401


def test_a_server_shuts_down_while_a_reader_listens(start):
    server = start()
    with stream(server) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: snapshot"
        head = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
        assert head == {"model": "demo", "block": ENGINE["state_block_size"], "weights": 0, "states": 0}
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 10


def test_readers_are_counted(start, monkeypatch):
    monkeypatch.setattr(events, "MOST_READERS", 1)
    server = start()
    with stream(server) as answer:
        lines = answer.iter_lines()
        next(lines)
        with stream(server) as second:
            assert second.status_code == 503

    def joins() -> bool:
        with stream(server) as again:
            return again.status_code == 200

    assert comes_true(joins, 20), "the one that left is not counted any more"


def test_conversations_go_where_they_can_be_gone_on_with(start, front):
    """Wherever a prompt was computed, by whatever API it comes back: it goes there, and is not computed again."""
    one, other = start(), start()
    over = front(one, other)
    texts = [f"{n}: {TEXT}" for n in range(4)]
    for text, server in zip(texts, (one, other, one, other), strict=True):
        server.complete(text)
    one.http.post("/v1/chat/completions", json={"model": "demo", "messages": CHAT, "max_tokens": 2})
    over.wait_until_told(one, other)
    for text in texts:
        assert cached(over.post("/v1/completions", prompt=text + MORE)) >= 15
    placement = over.status()["placement"]
    assert (placement["by_state"], placement["by_text"]) == (4, 0)
    workers = {worker["url"]: worker["requests"] for worker in over.status()["decode"]}
    assert workers == {one.url: 2, other.url: 2}
    assert cached(over.post("/v1/chat/completions", messages=CHAT)) > 0
    one.complete(TEXT, cache_salt="own")
    over.wait_until_told(one, other)
    assert cached(over.post("/v1/completions", prompt=TEXT + MORE, cache_salt="own")) >= 15
    over.post("/v1/messages", messages=CHAT)
    over.post("/v1/responses", input=TEXT)
    status = over.status()
    assert status["placement"]["by_state"] == 8
    assert {worker["url"]: worker["requests"] for worker in status["decode"]}[one.url] == 6
    assert status["placement"]["resumable_tokens"]["decode device"] > 100
    metrics = httpx.get(f"{over.url}/metrics").text
    assert 'mamba_jax_router_placed_total{by="state"} 8.0' in metrics
    assert 'mamba_jax_router_resumable_tokens_total{role="decode",tier="device"}' in metrics
    affinity = over.relay.settings.affinity
    by_text = [choose(over.relay.fleet.decode, (text + MORE).encode()[:affinity], slack=4).url for text in texts]
    moved = by_text != [one.url, other.url, one.url, other.url]
    assert status["placement"]["saved_tokens"] > 0 or not moved
    other.close()
    over.wait_until(lambda states: list(states) == [one.url])
    for text in texts:
        over.post("/v1/completions", prompt=text)
    assert over.status()["placement"]["by_text"] > 0


def test_routing_by_affinity_follows_no_worker(start, front):
    one, other = start(), start()
    over = front(one, other, routing="affinity")
    one.complete(TEXT)
    over.post("/v1/completions", prompt=TEXT)
    assert over.status()["states"] == {}
    assert over.status()["placement"]["by_text"] == 1


def test_a_busy_workers_state_goes_to_another_one(start, front):
    """Over HTTP and TCP: the one that lends has much to compute, so the other is chosen, and fetches."""
    role = SplitSettings.create(role="decode", share=True, split_secret=SECRET, transport="tcp")
    one, other = start(role), start(role)
    over = front(one, other, share_above=8)
    one.complete(TEXT)
    over.wait_until(lambda states: len(states) == 2 and states[one.url] > 0)
    (busy,) = [worker for worker in over.relay.fleet.decode if worker.url == one.url]
    busy.work.pending += 5000
    assert cached(over.post("/v1/completions", prompt=TEXT + " More of it.")) >= 15
    status = over.status()
    assert (status["relay"]["shared"], status["relay"]["alone"]) == (1, 1)
    assert {worker["url"]: worker["requests"] for worker in status["decode"]}[other.url] == 1
    assert other.http.get("/split/status", auth=SealAuth(SEAL)).json()["arrived"] == 1
    other.assert_idle()
    one.assert_idle()


@pytest.mark.full
def test_prompts_are_computed_where_most_of_them_is(start, front):
    """Of two prefill workers; what they compute goes to the decode worker, whichever API a prompt comes by."""
    roles = [SplitSettings.create(role=role, split_secret=SECRET, transport="tcp") for role in ("prefill", "decode")]
    one, other, decode = start(roles[0]), start(roles[0]), start(roles[1])
    over = front(decode, prefill=(one, other))
    texts = [f"{n}: {TEXT}" for n in range(4)]
    for text, server in zip(texts, (one, other, one, other), strict=True):
        server.complete(text)
    over.wait_until(lambda states: len(states) == 3 and states[one.url] > 1 and states[other.url] > 1)
    for text in texts:
        over.post("/v1/completions", prompt=text + " More of it.")
    status = over.status()
    assert (status["relay"]["split"], status["relay"]["alone"]) == (4, 0)
    assert {worker["url"]: worker["requests"] for worker in status["prefill"]} == {one.url: 2, other.url: 2}
    assert status["placement"]["resumable_tokens"]["prefill device"] >= 4 * 15
    assert decode.http.get("/split/status", auth=SealAuth(SEAL)).json()["arrived"] == 4
    for path, (body, last) in OTHER_FORMS.items():
        streamed = httpx.post(over.url + path, json=body | {"model": "demo", "stream": True, "cache_salt": "streamed"})
        assert last in streamed.text
        over.post(path, **body)
    assert over.status()["relay"]["split"] == 4 + 2 * len(OTHER_FORMS)
    assert decode.http.get("/split/status", auth=SealAuth(SEAL)).json()["arrived"] == 4 + 2 * len(OTHER_FORMS)
    for server in (one, other, decode):
        server.assert_idle()
