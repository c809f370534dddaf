"""Replicas that share one memory and one folder: each can continue from the others' states, without interference.

Their programs emit one token for ever and leave the store as it is.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.core.tiers.tier import Change
from serving.engine.replicas import ReplicaLoads
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.request import EngineRequest
from serving.engine.stats import merged_stats
from serving.tiers.storage import Memory
from tests.support.engines.small_tiers import DISK, HOST, PARAMS, ask, fill, tier_mover, tiers
from tests.support.fleets.split_pair import model, tokens
from tests.support.models.adapter_contents import CONTENTS, read_contents
from tests.support.waiting import comes_true


def names(tier) -> set:
    return {name for unit in tier.units.values() for name in (unit.name, *unit.blocks)}


def settle(engines):
    for engine in engines:
        tier_mover(engine).settle()
        engine.loop.inbox.take_all(idle=True)
        tier_mover(engine).exchange(engine.loop)
        tier_mover(engine).settle()


@pytest.mark.parametrize("flags", [HOST, DISK, pytest.param(HOST | DISK, marks=pytest.mark.full)])
def test_what_one_has_computed_the_other_goes_on_from(start, flags):
    one, other = start(replicas=2, **flags)
    fill(one)
    assert ask(other, "again", tokens(1, 61)) == 61
    assert other.stats()["prefill_tokens"] == 0
    fill(other, numbers=range(11, 17))
    assert ask(one, "too", tokens(11, 61)) == 61
    assert [sum(tier["arrived"] for tier in tiers(engine).values()) for engine in (one, other)] == [1, 1]
    assert all(tier["lost"] == 0 for tier in tiers(one).values())
    for engine in (one, other):
        engine.loop.scheduler.check(idle=True)


def test_what_they_hold_is_counted_once_and_what_they_fetch_by_each(start):
    one, other = start(replicas=2, **HOST)
    fill(one)
    ask(other, "again", tokens(1, 61))
    ask(other, "again", tokens(2, 61))
    ask(one, "again", tokens(1, 61))
    whole = merged_stats([one.stats(), other.stats()])
    found, tier = whole["tiers"]["host"], tier_mover(one).memory.tier
    assert (found["units"], found["used_bytes"], found["capacity_bytes"]) == (len(tier), tier.used, tier.capacity)
    assert found["stored"] == tier.stats.stored
    assert found["arrived"] == 3
    assert [engine["tiers"]["host"]["arrived"] for engine in whole["engines"]] == [1, 2]


@pytest.mark.full
def test_both_at_once_keep_to_the_caps(start, tmp_path):
    """Room for a few conversations in memory and a few more on the disk: both evict, write and fetch all the time."""
    one, other = start(replicas=2, **HOST, **DISK)
    memory, disk = tier_mover(one).memory, tier_mover(one).disk
    assert memory is tier_mover(other).memory
    for tier, conversations in ((memory.tier, 6), (disk.tier, 9)):
        tier.capacity = conversations * (tier.sizes.state + 4 * tier.sizes.whole_block)
    most, together = 0, threading.Barrier(2, timeout=60)

    def work(engine, behind):
        nonlocal most
        for number in range(40):
            together.wait()
            ask(engine, f"{number}", tokens((number - behind) % 37, 61))
            parts = memory._parts.copy().values()
            held = sum(array.nbytes for part in parts if part.done() for array in part.result().values())
            most = max(most, held)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (one, other), (0, 3)))

    def files():
        return {path.stem: path.stat().st_size for path in (tmp_path / "disk").rglob("*.safetensors")}

    # A look at the folder may have listed a file that was evicted before the result was applied. The next look tells.
    def listed():
        settle((one, other))
        return files().keys() >= {name.hex() for name in names(disk.tier)}

    assert comes_true(listed, 30, 0.2)
    for tier in (memory.tier, disk.tier):
        tier.check()
        assert tier.stats.evicted > 10
        assert 0 < tier.used <= tier.capacity
    assert 0 < most <= memory.tier.capacity
    assert memory._parts.keys() == names(memory.tier)
    assert not memory._promises
    assert sum(files().values()) <= disk.tier.capacity
    assert not disk._writes
    assert sum(tier["arrived"] for tier in tiers(other).values()) > 5, "it finds what the first has left"


def test_one_that_fails_harms_the_others_neither_in_memory_nor_on_the_disk(start, monkeypatch):
    one, other = start(replicas=2, **HOST, **DISK)
    leaving = tier_mover(one)

    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(leaving, "_copy", lambda *_: leaving._copying.submit(broken))
    fill(one)
    settle((one,))
    assert tiers(one)["host"]["units"] == tiers(one)["disk"]["units"] == 0
    assert tiers(one)["host"]["lost"] > 0
    fill(other)
    settle((other,))
    assert tiers(other)["disk"]["units"] > 0, "the disk has refused nothing"
    one.close()
    fill(other, numbers=range(11, 17))
    assert ask(other, "again", tokens(1, 61)) == 61
    settle((other,))
    assert tiers(other)["disk"]["units"] > 6


def test_only_those_that_were_given_the_same_weights_share(start):
    one, other = start(replicas=2, **HOST)
    fill(one)
    one.loop.scheduler.change_weights(1)
    fill(one)
    other.loop.scheduler.change_weights(2)
    fill(one, numbers=range(21, 27))
    assert ask(other, "again", tokens(21, 61)) == 0
    for engine in (one, other):
        engine.loop.scheduler.change_weights(3)
    fill(one)
    assert ask(other, "once more", tokens(1, 61)) == 61
    assert tiers(other)["host"]["arrived"] == 1


def test_a_device_that_has_a_state_is_preferred_to_those_that_would_fetch_it(start):
    engines = start(replicas=2, **HOST)
    placing = ReplicaLoads(engines)
    fill(engines[1])
    prompt = tokens(1, 61)
    assert [engine.loop.scheduler.reusable(prompt, None, None, {}) for engine in engines] == [(0, 61)] * 2
    given = [placing.give(prompt, EngineRequest("r", prompt, PARAMS)) for _ in range(4)]
    assert sorted(place.replica for place in given) == [0, 0, 1, 1], "it costs the same everywhere"
    for place in given:
        place.ended()
    assert ask(engines[1], "again", prompt) == 61
    for _ in range(4):
        place = placing.give(prompt, EngineRequest("r", prompt, PARAMS))
        assert place.replica == 1
        place.ended()


def test_a_part_is_promised_as_soon_as_the_books_have_it(start):
    one, _ = start(replicas=2, **HOST)
    fill(one)
    settle((one,))
    tier = tier_mover(one).memory.tier
    memory, (first, second, *_) = Memory(tier), list(tier.units)
    promise, broken = memory.get(first), memory.get(second)
    part = tier_mover(one).memory.get(first)
    memory.write(tier.units[first], Change([], [], 0), {first: part, b"unowned": part}, print)
    assert promise.result(timeout=0) is part.result()
    assert memory.get(first) is part
    with pytest.raises(KeyError):
        memory.get(b"unowned").result(timeout=0)
    assert not broken.done()
    tier.drop(second)
    with pytest.raises(KeyError):
        broken.result(timeout=0)
    assert len(memory._parts) == 1


@pytest.mark.smoke
@pytest.mark.smoke
@pytest.mark.parametrize("flags", [HOST, DISK])
def test_states_of_an_adapter_are_found_by_its_content(start, flags):
    engines = start(replicas=2, max_initial_states=1, **flags)
    one, other = [read_contents(engine, model()) for engine in engines]
    states = [str(number) for number, kind in enumerate(CONTENTS) if kind == "state"]
    tenant, reloaded = (LoRARequest("tenant", 0, path) for path in states)
    for number in range(1, 7):
        assert ask(one, f"first {number}", tokens(number, 61), lora_request=tenant) == 0
    settle(engines)
    prompt = tokens(1, 61)
    assert ask(other, "reloaded", prompt, lora_request=reloaded) == 0
    assert ask(other, "no adapter", tokens(2, 61)) == 0
    renamed = LoRARequest("renamed", 0, tenant.lora_path)
    assert ask(other, "the content under another name", prompt, lora_request=renamed) == 61
