"""Following workers' events; the workers are made up."""

import json

import pytest

from serving.core.cache.content import Chain, Scope
from serving.core.tiers.journal import Directory, Journal, Resumable
from serving.split.router import event_followers as following_module
from tests.support.servers.fake_workers import PROMPT, B, Servers, followed, state_of, then_silent, until

pytestmark = pytest.mark.usefixtures("publish_soon")


def by_host(found) -> dict[str, tuple[int, str]]:
    return {worker.url[-1]: (state.position, min(state.tiers)) for worker, state in found.items()}


async def test_each_worker_is_known_by_what_it_holds_now():
    a, b = Journal(B), Journal(B)
    a.stored("device", state_of(PROMPT[:8]))
    b.stored("host", state_of(PROMPT[:5]))
    async with followed(Servers(a=a, b=b)) as (fleet, following):
        await until(lambda: by_host(following.find(PROMPT, None)) == {"a": (8, "device"), "b": (5, "host")})
        b.stored("disk", state_of(PROMPT))
        a.evicted("device", state_of(PROMPT[:8]).name)
        await until(lambda: by_host(following.find(PROMPT, None)) == {"b": (11, "disk")})
        assert by_host(following.find(PROMPT[:7], None)) == {"b": (5, "host")}
        assert [following.has_stream(worker) for worker in fleet.decode] == [True, True, False]


async def test_salt_and_weights_are_a_part_of_every_name():
    a = Journal(B)
    a.stored("device", state_of(PROMPT, "secret"))
    async with followed(Servers(a=a)) as (_, following):
        await until(lambda: following.find(PROMPT, "secret"))
        assert not following.find(PROMPT, None)
        assert not following.find(PROMPT, "other")
        a.outdate()
        await until(lambda: not following.find(PROMPT, "secret"))
        a.stored("device", state_of(PROMPT[:8], "secret", weights=1))
        await until(lambda: by_host(following.find(PROMPT, "secret")) == {"a": (8, "device")})


async def test_a_stream_that_ends_is_forgotten_and_begun_again():
    a = Journal(B)
    a.stored("device", state_of(PROMPT))
    servers = Servers(a=a)
    async with followed(servers) as (fleet, following):
        await until(lambda: following.find(PROMPT, None))
        servers.ending.add("a")
        await until(lambda: not following.has_stream(fleet.decode[0]))
        assert not following.find(PROMPT, None)
        assert not following.knows_any
        servers.ending.clear()
        await until(lambda: following.find(PROMPT, None))
        fleet.follow(prefill=[], decode=["http://b"])
        await until(lambda: not following.find(PROMPT, None))
    assert servers.streams["a"] > 1


def message(kind, **fields) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(fields)}\n\n".encode()


HEAD = message("snapshot", block=B, weights=0)
NAME, NO_NUMBERS = "0" * 40, ("Infinity", "1e999", "[" * 100_000)
WRONG_STATES = [["0", NAME, 0, 0]], [[NAME, NAME, B, 9]], [[NAME, NAME]], 7
BLOCK_OF = 'event: snapshot\ndata: {"block": %s, "weights": 0}\n\n'
TAIL_OF = 'event: stored\ndata: {"tier": "device", "states": [["%s", "%s", 0, %s]]}\n\n'


@pytest.mark.parametrize(
    "said",
    [
        *(b"event: snapshot\ndata: " + data + b"\n\n" for data in (b"{", b"[]")),
        message("snapshot"),
        message("snapshot", block=0, weights=0),
        message("stored", tier="device", states=[]),
        *(HEAD + message("stored", tier="device", states=states) for states in WRONG_STATES),
        HEAD + message("evicted", tier="device", states=[3]),
        HEAD + b"x" * (1 << 21),
        *((BLOCK_OF % value).encode() for value in (*NO_NUMBERS, "NaN", '"4"', "4.0", "9" * 5000)),
        *(HEAD + (TAIL_OF % (NAME, NAME, value)).encode() for value in (*NO_NUMBERS, "-4", "{}")),
    ],
    ids=lambda said: said[-60:].decode()[:30].strip(),
)
async def test_a_worker_is_followed_again_after_malformed_events(said):
    """Once the worker says what it should, it is followed, whatever it said before."""
    good = Journal(B)
    good.stored("device", state_of(PROMPT[:8]))
    servers = Servers(a=then_silent(said))
    async with followed(servers) as (_, following):
        await until(lambda: "a" in servers.streams)
        servers.journals["a"] = good
        await until(lambda: by_host(following.find(PROMPT, None)) == {"a": (8, "device")})


def test_a_worker_that_contradicts_another_changes_nothing():
    """The same name with another tail or link: the first one's word counts, and both can go in any order."""
    honest = state_of(PROMPT[:9])
    for wrong in (honest._replace(tail=0, position=8), honest._replace(link=bytes(20)), honest._replace(position=13)):
        for first_to_go in (0, 1):
            directory = Directory(B)
            assert directory.stored(0, "device", honest)
            assert not directory.stored(1, "device", wrong)
            directory.evicted(1, "device", wrong.name)
            assert [*directory.find(Chain(Scope(None), B), PROMPT)] == [Resumable(0, 9, frozenset({"device"}))]
            directory.forget(first_to_go)
            directory.forget(1 - first_to_go)
            assert not len(directory)
            assert not list(directory.find(Chain(Scope(None), B), PROMPT))


async def test_more_states_than_a_worker_can_have_are_not_taken_in(monkeypatch):
    monkeypatch.setattr(following_module, "MOST_STATES", 3)
    a = Journal(B)
    for length in range(1, 6):
        a.stored("device", state_of(PROMPT[:length]))
    servers = Servers(a=a)
    async with followed(servers) as (fleet, following):
        await until(lambda: servers.streams.get("a", 0) > 1)
        await until(lambda: not following.states().get(fleet.decode[0].url))


async def test_a_silent_stream_counts_as_broken(monkeypatch):
    monkeypatch.setattr(following_module, "_SILENCE", 0.2)
    async with followed(Servers(a=then_silent(HEAD))) as (fleet, following):
        await until(lambda: following.has_stream(fleet.decode[0]))
        await until(lambda: not following.has_stream(fleet.decode[0]))
