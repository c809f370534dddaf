"""KV events: what a reader that counts blocks knows of a server, for random traffic and over ZeroMQ."""

import random
import time

import pytest

from serving.config import ConfigError
from serving.core.cache.content import Chain, Scope
from serving.split.kv_events import KvJournal, KvPublisher
from serving.split.settings import KvEventsSettings, SplitSettings
from tests.serving.core.drive import Loop

B = 4


class Reader:
    """A router that indexes blocks as vLLM's do: by their hashes, contiguous from a beginning, without counts."""

    def __init__(self, events=()) -> None:
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.ends: set[tuple[str, int]] = set()
        """Of the second group: media and blocks in which states end."""
        self.read(events)

    def read(self, events) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                self.ends.clear()
                continue
            if event["group_idx"]:
                named = {(event["medium"], each) for each in event["block_hashes"]}
                assert named.isdisjoint(self.ends) if event["type"] == "BlockStored" else named <= self.ends
                assert event.get("kv_cache_spec_kind", "mamba") == "mamba"
                self.ends ^= named
                continue
            held = self.blocks.setdefault(event["medium"], {})
            if event["type"] == "BlockRemoved":
                for each in event["block_hashes"]:
                    del held[each]
                continue
            before, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
            assert len(tokens) == size * len(event["block_hashes"])
            for at, each in enumerate(event["block_hashes"]):
                assert before is None or before in held, "a reader drops a block whose parent it does not know"
                assert each not in held, "a block is stored once"
                held[each] = before, tuple(tokens[at * size : (at + 1) * size])
                before = each


def hash_of(link: bytes) -> int:
    return int.from_bytes(link[:8], "big") >> 1


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_knows_the_blocks_that_lead_to_states_and_no_others(seed):
    rng, loop, reader = random.Random(seed), Loop(num_slots=10, num_pages=40), Reader()
    journal = KvJournal(B)
    loop.scheduler.tell(journal)
    prompts, salts = list[list[int]](), set[str]()
    for turn in range(60):
        begin = rng.choice(prompts)[: rng.randrange(30)] if prompts and rng.random() < 0.6 else []
        prompts.append(begin + [rng.randrange(9) for _ in range(rng.randrange(1, 24))])
        loop.run(prompts[-1], max_tokens=rng.randrange(1, 4), cache_salt=rng.choice([None, "salt"]))
        if turn == 40:
            loop.change_weights()
        if rng.random() < 0.3:
            continue
        events = journal.take()
        reader.read(events)
        assert all("cache_salt" not in event for event in events), "vLLM's router drops events with an unknown field"
        salts |= {salt for event in events for (salt,) in event.get("extra_keys") or ()}
        known = set(reader.blocks.get("GPU", {}))
        needed, ends = set(), set()
        for state in journal._held.get("device", {}).values():
            link = state.link
            if link in journal._blocks:
                ends.add(("GPU", hash_of(link)))
            while link in journal._blocks:
                needed.add(hash_of(link))
                link = journal._blocks[link].parent
        assert known == needed
        assert reader.ends == ends
        fresh = Reader(journal.present())
        assert fresh.blocks.get("GPU", {}) == reader.blocks.get("GPU", {}), "a replay is what was read"
        assert fresh.ends == ends
    assert known
    assert salts == {"salt"}


def test_tokens_salts_and_tiers_are_told():
    loop, journal, reader = Loop(), KvJournal(B, salts=True), Reader()
    loop.scheduler.tell(journal)
    prompt = [*range(1, 9), 3]
    loop.run(prompt, max_tokens=1, cache_salt="mine")
    events = journal.take()
    reader.read(events)
    first, second = map(hash_of, Chain(Scope("mine"), B).reach(prompt)[1:])
    assert reader.blocks["GPU"][first] == (None, (1, 2, 3, 4))
    assert reader.blocks["GPU"][second] == (first, (5, 6, 7, 8))
    assert {(event["cache_salt"], event["medium"]) for event in events} == {("mine", "GPU")}
    (state,) = [state for state in journal._held["device"].values() if state.position == 9]
    journal.stored("host", state)
    journal.evicted("device", state.name)
    reader.read(journal.take())
    assert list(reader.blocks["CPU"]) == [first, second]
    journal.lost("device")
    reader.read(journal.take())
    assert not reader.blocks["GPU"]
    assert reader.ends == {("CPU", second)}
    journal.outdate()
    assert journal.take() == [{"type": "AllBlocksCleared"}]
    assert journal.present() == []


def test_a_reader_that_is_far_behind_begins_anew(monkeypatch):
    monkeypatch.setattr("serving.split.kv_events._MOST_CHANGES", 3)
    loop, journal = Loop(), KvJournal(B)
    loop.scheduler.tell(journal)
    for number in range(12):
        loop.run([number % 9, *range(8)], max_tokens=1)
    events = journal.take()
    assert events[0] == {"type": "AllBlocksCleared"}
    assert Reader(events).blocks == Reader(journal.present()).blocks


@pytest.mark.parametrize("wrong", ["[]", "{", '{"topics": "x"}', '{"publisher": "kafka"}', '{"hwm": 0}'])
def test_wrong_settings_are_one_line(wrong):
    with pytest.raises(ConfigError) as refused:
        assert SplitSettings.create(kv_events_config=wrong).kv_events
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("off", [None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
def test_nothing_is_published_unless_it_is_asked_for(off):
    assert SplitSettings.create(kv_events_config=off).kv_events is None


def test_events_and_replays_over_zeromq():
    zmq = pytest.importorskip("zmq", reason="needs the extra events")
    msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
    loop, journal = Loop(), KvJournal(B)
    loop.scheduler.tell(journal)
    context = zmq.Context.instance()
    chosen = {"endpoint": "inproc://events", "replay_endpoint": "inproc://replays", "topic": "kv"}
    publisher = KvPublisher(journal, KvEventsSettings.create(**chosen))
    with context.socket(zmq.SUB) as events, context.socket(zmq.REQ) as replays:
        for reading, endpoint in ((events, "inproc://events"), (replays, "inproc://replays")):
            reading.setsockopt(zmq.RCVTIMEO, 20_000)
            reading.connect(endpoint)
        events.subscribe(b"kv")
        time.sleep(0.2)
        loop.run(list(range(9)), max_tokens=1)
        reader, numbers = Reader(), []
        while not reader.blocks:
            topic, number, batch = events.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            _, told, rank = msgspec.msgpack.decode(batch)
            reader.read(told)
            assert (topic, rank) == (b"kv", 0)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        replays.send((0).to_bytes(8, "big"))
        topic, number, batch = replays.recv_multipart()
        again = Reader()
        again.blocks["GPU"] = {1: (None, ())}  # whose removal it missed
        again.read(msgspec.msgpack.decode(batch)[1])
        assert again.blocks == reader.blocks
    publisher.close()
