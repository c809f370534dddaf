"""Choosing workers by the states that they report; the workers are made up."""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import pytest

from serving.core.tiers.journal import Journal, Resumable
from serving.split.router.placement import ClientRequest, Placement, PromptMatch
from serving.split.router.relay import Relay, RelayStats
from serving.split.router.workers import choose
from tests.support.servers.fake_workers import PROMPT, B, Servers, all_of, fleet_of, followed, state_of, until

pytestmark = pytest.mark.usefixtures("publish_soon")


def placement(*names):
    return Placement(fleet_of(Servers(), decode=names), None)


def found(place, tokens=100, **positions) -> PromptMatch:
    workers = {worker.url[-1]: worker for worker in place.fleet.decode}
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


async def test_what_is_being_computed_counts_until_it_is_or_should_be():
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
    lines = {sample.name: sample.value for each in Relay.collect(relay) for sample in each.samples}
    assert lines["mamba_jax_router_saved_tokens_total"] == 13


async def routed(body, text="some text", decode=("a", "b"), tokens=None):
    """A request to a router, of whose workers the first has a state of `text`: the chosen one, counters, and what
    workers were asked."""
    servers = Servers(**{name: Journal(B) for name in decode})
    servers.journals["a"].stored("device", state_of(PROMPT if text is None else [ord(each) for each in text]))
    servers.tokens = tokens
    async with followed(servers, decode) as (fleet, following):
        relay = Relay(fleet, following)
        await until(lambda: following.knows_any)
        async with asyncio.timeout(5):
            answer = await relay.answer(ClientRequest("completions", json.dumps(body).encode(), body, {}))
            chosen = json.loads(b"".join(await all_of(answer.body)))["from"]
    return chosen, relay.placement.stats, servers.asked


@pytest.mark.parametrize("trouble", ["refused", "late", "endless", "nonsense"])
async def test_text_decides_if_no_worker_tokenizes_the_prompt(trouble, monkeypatch):
    monkeypatch.setattr("serving.split.router.placement._PATIENCE", 0.3)
    monkeypatch.setattr("serving.split.router.placement._LONGEST", 1000)

    async def tokens():
        if trouble == "late":
            await asyncio.sleep(60)
        content = {"refused": b"{}", "endless": b"1" * 2000, "nonsense": b'{"tokens": "?"}'}[trouble]
        return httpx.Response(400 if trouble == "refused" else 200, content=content)

    chosen, stats, _ = await routed({"prompt": "some text"}, tokens=tokens)
    assert chosen == choose(fleet_of(Servers(), decode=("a", "b")).decode, b"some text", slack=4).url[-1]
    assert stats.untold == 1


@pytest.mark.parametrize("body", [{"prompt": [1 << 70]}, {"prompt": [-1]}, {"prompt": PROMPT, "cache_salt": 5}])
async def test_what_cannot_be_a_prompt_is_left_to_a_worker(body):
    """It has no name, and a worker says best what is wrong with it."""
    _, stats, _ = await routed(body, text=None)
    assert (stats.by_text, stats.untold) == (1, 1)


async def test_no_worker_is_asked_if_there_is_no_choice():
    _, _, requests = await routed({"prompt": "some text"}, decode=("a",))
    assert ("a", "/internal/tokens") not in requests
