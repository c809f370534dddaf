"""The simulation of many replicas, and the directory that its router learns from events."""

import argparse
import random

import pytest

from benchmarks.replica_placement import POLICIES, simulate
from serving.core import CheckpointKind
from serving.core.cache.prefix_tree import Scope
from serving.core.tiers.content import Chain, state_name
from serving.core.tiers.directory import Directory
from serving.core.tiers.tier import Unit

B = 4


def unit(tokens) -> Unit:
    links = tuple(Chain(Scope(None), B).reach(tokens))
    tail = tokens[len(tokens) // B * B :]
    return Unit(state_name(links[-1], tail), links, len(tail), len(tokens), CheckpointKind.PROMPT_END)


def found(directory: Directory, tokens) -> list[tuple[int, int]]:
    return [(each.replica, each.position) for each in directory.find(Chain(Scope(None), B), tokens)]


def test_each_replica_is_found_at_its_deepest_state():
    directory, tokens = Directory(B), list(range(12))
    for replica, length in ((0, 3), (1, 7), (0, 8), (2, 8)):
        directory.stored(replica, "device", unit(tokens[:length]).state)
    assert found(directory, tokens) == [(0, 8), (2, 8), (1, 7)]
    assert found(directory, tokens[:7]) == [(1, 7), (0, 3)]
    directory.stored(0, "host", unit(tokens[:8]).state)
    directory.evicted(0, "device", unit(tokens[:8]).name)
    assert found(directory, tokens)[0] == (2, 8) or found(directory, tokens)[0] == (0, 8)
    directory.evicted(0, "host", unit(tokens[:8]).name)
    assert found(directory, tokens) == [(2, 8), (1, 7), (0, 3)]
    directory.forget(2)
    assert found(directory, tokens) == [(1, 7), (0, 3)]


def test_any_events_leave_what_a_plain_list_says():
    rng = random.Random(3)
    directory, told = Directory(B), set()
    sequences = [[rng.randrange(2) for _ in range(12)] for _ in range(3)]
    for _ in range(2000):
        tokens = tuple(rng.choice(sequences)[: rng.randrange(1, 12)])
        replica, tier, stored = rng.randrange(3), rng.choice(["device", "host"]), rng.random() < 0.5
        state = unit(list(tokens)).state
        if rng.random() < 0.01:
            directory.forget(replica)
            told = {each for each in told if each[0] != replica}
        elif stored:
            directory.stored(replica, tier, state)
            told.add((replica, tier, tokens))
        else:
            directory.evicted(replica, tier, state.name)
            told.discard((replica, tier, tokens))
        asked = rng.choice(sequences)
        want: dict[int, int] = {}
        for which, _, known in told:
            if tuple(asked[: len(known)]) == known:
                want[which] = max(want.get(which, 0), len(known))
        assert dict(found(directory, asked)) == want
    for replica in range(3):
        directory.forget(replica)
    assert (len(directory), directory._tails, directory._told) == (0, {}, {}), "unused entries remain"


@pytest.mark.parametrize("count", [1, 8])
def test_events_balance_the_load_and_tiers_find_more(count):
    options = argparse.Namespace(host=256, room=16, seed=0, prompts=50, sessions=24, requests=40, slack=1.0)
    lines = {policy: simulate(policy, count, options) for policy in POLICIES}
    assert 0.3 < lines["events"]["hits"] < lines["tiers"]["hits"] <= 1.0
    assert lines["events"]["hits"] < lines["router"]["hits"] <= 1.0
    if count > 1:
        assert lines["router"]["balance"] < lines["affinity"]["balance"]
        assert lines["router"]["first_token_mean"] < lines["affinity"]["first_token_mean"]
        assert lines["events"]["balance"] < lines["affinity"]["balance"]
        assert lines["tiers"]["first_token_mean"] < lines["events"]["first_token_mean"]
        assert lines["events"]["first_token_mean"] < lines["affinity"]["first_token_mean"]
