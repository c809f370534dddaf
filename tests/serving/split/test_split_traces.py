"""Random traffic over two workers, judged request by request against one engine without cache, drafts and split.

A trace is a number: it decides the cache mode, drafts, who asks what and when, by which handoff or with none, how late
states arrive, whether they arrive, who is aborted, and how many pages and slots there are.
"""

import dataclasses
import random
from collections import Counter

import pytest

from serving.split.wire import SplitError
from tests.support.engines.delayed_executor import DelayedExecutor
from tests.support.engines.engines import finish
from tests.support.fleets.split_pair import GREEDY, VOCAB, B, Pair, assert_as_alone, tokens

MET: Counter = Counter()
LENGTHS = (1, 2, 7, 8, 9, B - 1, B, B + 1, 2 * B, 2 * B + 3, 3 * B + 5)


def draw_prompt(rng):
    base = tokens(rng.randrange(3), 64)[: rng.choice(LENGTHS)]
    tail = random.Random(rng.randrange(4))
    return base + [tail.randrange(VOCAB) for _ in range(rng.choice([0, 0, 0, 1, 5]))]


def run_trace(seed, mode, source):
    rng = random.Random(seed)
    executor = DelayedExecutor(rng)
    pair = Pair(mode, source, executor=executor)
    slots, pages = pair.decode.loop.scheduler.pools
    away = [(pages, pages.take()) for _ in range(rng.choice([0, 20, 27]))]
    away += [(slots, slots.take()) for _ in range(rng.choice([0, 10]))]
    break_some(pair, rng, rng.choice([0.0, 0.0, 0.3]))
    asked, aborted = [], set()
    for _ in range(rng.randrange(4, 10)):
        prompt = draw_prompt(rng)
        salt = "salt" if rng.random() < 0.1 else None
        ticket = pair.compute(prompt, rng.choice(["full", "recompute-last"]), salt) if rng.random() < 0.8 else None
        length = 40 if len(prompt) <= 40 and rng.random() < 0.5 else 12
        params = dataclasses.replace(GREEDY, max_tokens=length)
        output = pair.add(prompt, ticket, params, cache_salt=salt, priority=rng.choice([0, 0, 1]))
        asked.append((prompt, output, length))
        for _ in range(rng.randrange(4)):
            pair.decode.step()
            pair.decode.loop.scheduler.check()
            executor.run(rng.random())
        if rng.random() < 0.15:
            output = rng.choice(asked)[1]
            MET["aborted"] += pair.decode.abort(output.request_id) is not None
            aborted.add(output.request_id)
        if rng.random() < 0.05:
            pair.decode.loop._forget()
            MET["stores lost"] += 1
    for _ in range(3000):
        if not pair.decode.loop.busy and not executor.jobs:
            break
        pair.decode.step()
        executor.run(0.5)
    executor.run()
    finish(pair.decode)
    for prompt, output, length in asked:
        assert output.finished
        if output.request_id not in aborted:
            assert_as_alone(prompt, output, (seed, mode, source), count=length)
    stats = pair.decode_side.stats
    for name in ("arrived", "failed", "late", "spared", "pages_spared"):
        MET[name] += getattr(stats, name)
    MET["preemptions"] += pair.decode.loop.scheduler.stats()["preemptions"]
    for pool, taken in away:
        pool.release(taken)  # after a failure of a pool that is gone
    pair.assert_idle()


def break_some(pair, rng, share):
    offer = pair.peer.offer

    def unsure(want, seconds):
        if rng.random() < share:
            raise SplitError("injected: no answer")
        return offer(want, seconds)

    pair.peer.offer = unsure


@pytest.mark.full
def test_traces():
    """One test, because what all traces meet together is asserted as well."""
    MET.clear()
    for mode in ("none", "align", "all"):
        for source in ("none", "ngram", "mtp"):
            for seed in range(8):
                run_trace(f"{seed} {mode} {source}", mode, source)
    for what in ("arrived", "failed", "late", "spared", "pages_spared", "aborted", "preemptions"):
        assert MET[what], (what, MET)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_traces(seed):
    rng = random.Random(seed)
    run_trace(seed, rng.choice(["none", "align", "all"]), rng.choice(["none", "ngram"]))
