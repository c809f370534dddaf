"""Following workers' events, and choosing workers by them; the workers are made up."""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import pytest

from serving.core.cache.content import Chain, Scope, State, state_name
from serving.core.tiers.directory import Directory, Resumable
from serving.core.tiers.journal import Journal
from serving.split.http.events import follow
from serving.split.router import event_followers as following_module
from serving.split.router.app import RelayCollector
from serving.split.router.client_request import ClientRequest
from serving.split.router.event_followers import EventFollowers
from serving.split.router.placement import Placement, PromptMatch
from serving.split.router.relay import Relay, RelayStats
from serving.split.router.workers import Fleet, choose
from serving.split.settings import RouterSettings

B = 4
PROMPT = list(range(11))


def state_of(tokens, salt=None, weights=0) -> State:
    links = Chain(Scope(salt, weights), B).reach(tokens)
    tail = len(tokens) % B
    return State(state_name(links[-1], tokens[len(tokens) - tail :]), links[-1], tail, len(tokens))


async def whole(content):
    yield content


class Servers:
    """Workers that publish their journals, and tokenise what they are given: a letter a token."""

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
            return httpx.Response(200, json={"tokens": [ord(each) for each in body["prompt"]], "salt": None})
        if path.startswith("/v1/"):
            return httpx.Response(200, content=whole(json.dumps({"from": host}).encode()))
        return httpx.Response(404)


def fleet_of(servers, decode=("a", "b", "c"), prefill=()):
    client = httpx.AsyncClient(transport=httpx.MockTransport(servers))
    return Fleet.of([f"http://{name}" for name in prefill], [f"http://{name}" for name in decode], client)


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def run(servers, test, **options):
    """`test(fleet, following)` while all streams are followed."""

    async def all_of_it():
        fleet = fleet_of(servers, **options)
        following = EventFollowers(fleet)
        task = asyncio.create_task(following.follow(0.05))
        try:
            await test(fleet, following)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(all_of_it())


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(following_module, "_AGAIN", 0.05)
    monkeypatch.setattr("serving.split.http.events._LOOK", 0.01)


def by_host(found) -> dict[str, tuple[int, str]]:
    return {worker.url[-1]: (state.position, min(state.tiers)) for worker, state in found.items()}


def test_each_worker_is_known_by_what_it_holds_now():
    a, b = Journal(B), Journal(B)
    a.stored("device", state_of(PROMPT[:8]))
    b.stored("host", state_of(PROMPT[:5]))

    async def test(fleet, following):
        await until(lambda: by_host(following.find(PROMPT, None)) == {"a": (8, "device"), "b": (5, "host")})
        b.stored("disk", state_of(PROMPT))
        a.evicted("device", state_of(PROMPT[:8]).name)
        await until(lambda: by_host(following.find(PROMPT, None)) == {"b": (11, "disk")})
        assert by_host(following.find(PROMPT[:7], None)) == {"b": (5, "host")}
        assert [following.has_stream(worker) for worker in fleet.decode] == [True, True, False]

    run(Servers(a=a, b=b), test)


def test_salt_and_weights_are_a_part_of_every_name():
    a = Journal(B)
    a.stored("device", state_of(PROMPT, "secret"))

    async def test(fleet, following):
        await until(lambda: following.find(PROMPT, "secret"))
        assert not following.find(PROMPT, None)
        assert not following.find(PROMPT, "other")
        a.outdate()
        await until(lambda: not following.find(PROMPT, "secret"))
        a.stored("device", state_of(PROMPT[:8], "secret", weights=1))
        await until(lambda: by_host(following.find(PROMPT, "secret")) == {"a": (8, "device")})

    run(Servers(a=a), test)


def test_a_stream_that_ends_is_forgotten_and_begun_again():
    a = Journal(B)
    a.stored("device", state_of(PROMPT))
    servers = Servers(a=a)

    async def test(fleet, following):
        await until(lambda: following.find(PROMPT, None))
        servers.ending.add("a")
        await until(lambda: not following.has_stream(fleet.decode[0]))
        assert not following.find(PROMPT, None)
        assert not following.knows_any
        servers.ending.clear()
        await until(lambda: following.find(PROMPT, None))
        fleet.follow(prefill=[], decode=["http://b"])
        await until(lambda: not following.find(PROMPT, None))

    run(servers, test)
    assert servers.streams["a"] > 1


def message(kind, **fields) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(fields)}\n\n".encode()


HEAD = message("snapshot", block=B, weights=0)
NAME = "0" * 40


@pytest.mark.parametrize("said", [
    b"event: snapshot\ndata: {\n\n", b"event: snapshot\ndata: []\n\n", message("snapshot"),
    message("snapshot", block=0, weights=0), message("stored", tier="device", states=[]),
    HEAD + message("stored", tier="device", states=[["0", NAME, 0, 0]]),
    HEAD + message("stored", tier="device", states=[[NAME, NAME, B, 9]]),
    HEAD + message("stored", tier="device", states=[[NAME, NAME]]),
    HEAD + message("stored", tier="device", states=7), HEAD + message("evicted", tier="device", states=[3]),
    HEAD + b"x" * (1 << 21),
])  # fmt: skip
def test_a_stream_of_nonsense_is_given_up(said):
    async def talk():
        yield said
        await asyncio.sleep(60)

    async def test(fleet, following):
        await until(lambda: ("a", "/internal/events") in servers.asked)
        await until(lambda: not following.has_stream(fleet.decode[0]))
        await asyncio.sleep(0.1)
        assert not following.has_stream(fleet.decode[0])

    servers = Servers(a=talk())
    run(servers, test)


BLOCK_OF = 'event: snapshot\ndata: {"block": %s, "weights": 0}\n\n'
TAIL_OF = 'event: stored\ndata: {"tier": "device", "states": [["%s", "%s", 0, %s]]}\n\n'


@pytest.mark.parametrize(
    "said",
    [
        *(
            (BLOCK_OF % value).encode()
            for value in ("Infinity", "1e999", "NaN", '"4"', "4.0", "[" * 100_000, "9" * 5000)
        ),
        *(
            HEAD + (TAIL_OF % (NAME, NAME, value)).encode()
            for value in ("Infinity", "1e999", "-4", "{}", "[" * 100_000)
        ),
    ],
    ids=lambda said: said[-60:].decode()[:30].strip(),
)
def test_a_worker_is_followed_again_after_malformed_events(said):
    """Once the worker says what it should, it is followed, whatever it said before."""

    async def talk():
        yield said
        await asyncio.sleep(60)

    good = Journal(B)
    good.stored("device", state_of(PROMPT[:8]))

    async def test(fleet, following):
        await until(lambda: "a" in servers.streams)
        servers.journals["a"] = good
        await until(lambda: by_host(following.find(PROMPT, None)) == {"a": (8, "device")})

    servers = Servers(a=talk())
    run(servers, test)


def test_a_worker_that_contradicts_another_changes_nothing():
    """The same name with another tail or link: the first one's word counts, and both can go in any order."""
    honest = state_of(PROMPT[:9])
    for wrong in (honest._replace(tail=0, position=8), honest._replace(link=bytes(20)), honest._replace(position=13)):
        for first_to_go in (0, 1):
            directory = Directory(B)
            assert directory.stored(0, "device", honest)
            assert not directory.stored(1, "device", wrong)
            directory.evicted(1, "device", wrong.name)
            found = list(directory.find(Chain(Scope(None), B), PROMPT))
            assert found == [Resumable(0, 9, frozenset({"device"}))]
            directory.forget(first_to_go)
            directory.forget(1 - first_to_go)
            assert not len(directory)
            assert not list(directory.find(Chain(Scope(None), B), PROMPT))


def test_more_states_than_a_worker_can_have_are_not_taken_in(monkeypatch):
    monkeypatch.setattr(following_module, "MOST_STATES", 3)
    a = Journal(B)
    for length in range(1, 6):
        a.stored("device", state_of(PROMPT[:length]))

    async def test(fleet, following):
        await until(lambda: servers.streams.get("a", 0) > 1)
        assert following.states_of(fleet.decode[0]) <= 5

    servers = Servers(a=a)
    run(servers, test)


def test_a_silent_stream_counts_as_broken(monkeypatch):
    monkeypatch.setattr(following_module, "_SILENCE", 0.2)

    async def talk():
        yield HEAD
        await asyncio.sleep(60)

    async def test(fleet, following):
        await until(lambda: following.has_stream(fleet.decode[0]))
        await until(lambda: not following.has_stream(fleet.decode[0]))

    run(Servers(a=talk()), test)


# -- choosing --


def placement(*names, prefill=(), **settings):
    fleet = fleet_of(Servers(), decode=names, prefill=prefill)
    return Placement(fleet, RouterSettings.create(decode=("http://a",), **settings), None)


def found(place, tokens=100, **positions) -> PromptMatch:
    workers = {worker.url[-1]: worker for worker in (*place.fleet.decode, *place.fleet.prefill)}
    return PromptMatch({
        workers[name]: Resumable(at, position, frozenset([tier]))
        for at, (name, (position, tier)) in enumerate(positions.items())
    }, tokens)  # fmt: skip


def test_who_has_the_least_to_compute_is_chosen():
    place = placement("a", "b", "c")
    a, b, c = place.fleet.decode

    def chosen(tokens=2000, **positions):
        return place.choose(place.fleet.decode, b"key", found(place, tokens, **positions)).url[-1]

    assert chosen(a=(800, "device"), b=(1100, "disk")) == "b", "the deepest"
    assert chosen(a=(800, "host"), b=(800, "device"), c=(400, "device")) == "b", "the faster tier"
    b.load = 2
    assert chosen(a=(800, "host"), b=(800, "device")) == "a", "the fewer requests"
    b.load = 0
    b.work.pending = 1000
    assert chosen(b=(800, "device"), c=(400, "device")) == "c", "the first would have to compute something else first"
    b.work.pending = 0
    b.up = False
    by_text = choose(place.fleet.decode, b"key", slack=place.settings.slack)
    assert chosen(b=(1900, "device")) == by_text.url[-1], "no worker that is up has any of it"
    b.up = True
    b.work.given(60_000, time.monotonic())
    b.work.computed(60_000)
    assert chosen(b=(1900, "device")) in "ac", "it has had far more than its share"
    assert chosen(tokens=50_000, b=(49_000, "device")) == "b", "but that would be a waste"
    assert (place.stats.by_state, place.stats.by_load, place.stats.by_text) == (5, 1, 1)
    assert place.stats.resumable_tokens == {
        ("decode", "disk"): 1100, ("decode", "device"): 800 + 400 + 49_000, ("decode", "host"): 800,
    }  # fmt: skip
    assert a.work.pending == b.work.pending == c.work.pending == 0


def test_a_popular_beginning_spreads_over_the_fleet():
    """Many conversations have the same beginning, which one worker has. No worker gets much more than its share."""
    place, given = placement("a", "b", "c", "d"), {}
    holding = {"a": (3000, "device")}
    for _ in range(400):
        worker = place.choose(place.fleet.decode, b"same", found(place, 4000, **holding))
        name = worker.url[-1]
        tokens = 4000 - holding.get(name, (0,))[0]
        worker.work.given(tokens, time.monotonic())
        worker.work.computed(tokens)
        given[name] = given.get(name, 0) + tokens
        holding[name] = (3000, "device")
    assert len(given) == 4
    assert max(given.values()) < 1.3 * sum(given.values()) / 4
    assert sum(given.values()) < 1.1 * 400 * 1000


def test_a_lone_conversation_stays_where_it_is():
    place, length = placement("a", "b", "c"), 500
    place.fleet.decode[0].work.given(length, time.monotonic())
    place.fleet.decode[0].work.computed(length)
    for _ in range(30):
        worker = place.choose(place.fleet.decode, b"same", found(place, length + 300, a=(length, "device")))
        assert worker.url == "http://a"
        worker.work.given(300, time.monotonic())
        worker.work.computed(300)
        length += 300


def test_what_is_being_computed_counts_until_it_is_or_should_be():
    async def test():
        (worker,) = fleet_of(Servers(), decode=("a",)).decode
        with worker.computing(100):
            assert worker.work.pending == 100
            with worker.computing(50, seconds=0.05):
                assert worker.work.pending == 150
                await asyncio.sleep(0.2)
                assert worker.work.pending == 100
            assert worker.work.pending == 100
        assert worker.work.pending == 0
        assert 140 < worker.work.recent(time.monotonic()) <= 150

    asyncio.run(test())


def test_what_is_saved_is_counted_against_the_choice_by_text():
    place = placement("a", "b")
    key = next(key for key in (str(n).encode() for n in range(99))
               if choose(place.fleet.decode, key, slack=4).url == "http://a")  # fmt: skip
    place.choose(place.fleet.decode, key, found(place, a=(3, "device"), b=(8, "host")))
    assert place.stats.saved_tokens == 5
    place.choose(place.fleet.decode, key, found(place, b=(8, "host")))
    assert place.stats.saved_tokens == 13
    place.choose(place.fleet.decode, key, found(place, a=(8, "host")))
    assert place.stats.saved_tokens == 13
    relay = SimpleNamespace(placement=place, stats=RelayStats(), fleet=place.fleet)
    lines = {sample.name: sample.value for each in RelayCollector(relay).collect() for sample in each.samples}
    assert lines["mamba_jax_router_saved_tokens_total"] == 13


def ask(relay, body):
    async def answer():
        got = await relay.answer(ClientRequest("completions", json.dumps(body).encode(), body, {}))
        return json.loads(b"".join([piece async for piece in got.body]))["from"]

    return answer()


def test_requests_go_where_their_prompts_can_be_gone_on_from():
    """Prompts of tokens and of text, and text affinity where nothing is known of them."""
    texts = [f"{n} is how this prompt begins" for n in range(6)]
    journals = {name: Journal(B) for name in "abc"}
    for at, text in enumerate(texts):
        journals["abc"[at % 3]].stored("device", state_of([ord(each) for each in text[:20]]))
    servers = Servers(**journals)

    async def test(fleet, following):
        relay = Relay(fleet, RouterSettings.create(decode=("http://a",), slack=9), following)
        await until(lambda: sum(map(following.states_of, fleet.decode)) == 6)
        for at, text in enumerate(texts):
            tokens = [ord(each) for each in text]
            for body in ({"prompt": text}, {"prompt": tokens}, {"prompt": tokens[:21]}):
                assert await ask(relay, body) == "abc"[at % 3]
        assert relay.placement.stats.saved_tokens > 0
        assert relay.placement.stats.resumable_tokens == {("decode", "device"): 3 * 6 * 20}
        for body in ({"prompt": "something else"}, {"prompt": texts[0][:9]}, {"prompt": [1, 2, 3]}):
            key = (body["prompt"] if isinstance(body["prompt"], str) else json.dumps(body["prompt"])).encode()
            assert await ask(relay, body) == choose(fleet.decode, key, slack=9).url[-1]
        assert relay.placement.stats.by_text == 3

    run(servers, test)


@pytest.mark.parametrize("trouble", ["refused", "late", "endless", "nonsense"])
def test_text_decides_if_no_worker_tokenises_the_prompt(trouble, monkeypatch):
    monkeypatch.setattr("serving.split.router.placement._PATIENCE", 0.3)
    monkeypatch.setattr("serving.split.router.placement._LONGEST", 1000)
    servers = Servers(a=Journal(B), b=Journal(B))
    servers.journals["a"].stored("device", state_of([ord(each) for each in "some text"]))

    async def tokens():
        if trouble == "late":
            await asyncio.sleep(60)
        content = {"refused": b"{}", "endless": b"1" * 2000, "nonsense": b'{"tokens": "?"}'}[trouble]
        return httpx.Response(400 if trouble == "refused" else 200, content=content)

    servers.tokens = tokens

    async def test(fleet, following):
        relay = Relay(fleet, RouterSettings.create(decode=("http://a",)), following)
        await until(lambda: following.knows_any)
        async with asyncio.timeout(5):
            chosen = await ask(relay, {"prompt": "some text"})
        assert chosen == choose(fleet.decode, b"some text", slack=4).url[-1]
        assert relay.placement.stats.untold == 1

    run(servers, test, decode=("a", "b"))


@pytest.mark.parametrize("body", [{"prompt": [1 << 70]}, {"prompt": [-1]}, {"prompt": PROMPT, "cache_salt": 5}])
def test_what_cannot_be_a_prompt_is_left_to_a_worker(body):
    """It has no name, and a worker says best what is wrong with it."""
    servers = Servers(a=Journal(B), b=Journal(B))
    servers.journals["a"].stored("device", state_of(PROMPT))

    async def test(fleet, following):
        relay = Relay(fleet, RouterSettings.create(decode=("http://a",)), following)
        await until(lambda: following.knows_any)
        await ask(relay, body)
        assert (relay.placement.stats.by_text, relay.placement.stats.untold) == (1, 1)

    run(servers, test, decode=("a", "b"))


def test_no_worker_is_asked_if_there_is_no_choice():
    servers = Servers(a=Journal(B))
    servers.journals["a"].stored("device", state_of(PROMPT))

    async def test(fleet, following):
        relay = Relay(fleet, RouterSettings.create(decode=("http://a",)), following)
        await until(lambda: following.knows_any)
        await ask(relay, {"prompt": "some text"})
        assert ("a", "/internal/tokens") not in servers.asked

    run(servers, test, decode=("a",))
