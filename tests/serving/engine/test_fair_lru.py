"""Owners of a bounded store do not evict each other's shares."""

import random
from collections import Counter

import pytest

from serving.engine.fair_lru import FairLru


@pytest.mark.parametrize("limit", ["number", "bytes"])
def test_an_owner_evicts_its_own(limit):
    most = {"number": (6, 10**9), "bytes": (10**9, 60)}[limit]
    store = FairLru[int](*most)
    for i in range(2):
        store.put(f"theirs {i}", i, "them", 10)
    for i in range(50):
        store.put(f"mine {i}", i, "me", 10)
    assert [store.get(f"theirs {i}") for i in range(2)] == [0, 1]
    assert (len(store), store.num_bytes) == (6, 60)
    assert [store.get(f"mine {i}") for i in (45, 46, 49)] == [None, 46, 49]
    store.put("mine 50", 50, "me", 10)
    assert store.get("mine 47") is None  # the least recently used
    assert store.get("mine 46") == 46


def test_a_value_is_replaced_and_a_large_one_is_not_stored():
    store = FairLru[int](4, 20)
    store.put("a", 1, "x", 5)
    store.put("a", 2, "y", 6)
    assert (store.get("a"), len(store), store.num_bytes) == (2, 1, 6)
    store.put("b", 3, "z", 100)
    assert (store.get("a"), store.get("b")) == (2, None)
    store.pop("a")
    store.pop("a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_shares_in_random_traffic():
    """An owner that holds no more than its share of number and bytes never loses a value."""
    rng, store, owners = random.Random(3), FairLru[str](30, 300), "abc"
    for i in range(2000):
        owner = rng.choice(owners)
        before = {each: list(store._used.get(each, ())) for each in owners}
        held = Counter({each: store._bytes[each] for each in owners})
        store.put(f"{owner}{i}", owner, owner, rng.randrange(20))
        assert len(store) <= 30
        assert store.num_bytes <= 300
        for each in owners:
            if each != owner and len(before[each]) <= 10 and held[each] <= 100:
                assert list(store._used.get(each, ())) == before[each]
