"""Marks: where states are published, how long they are kept, and whose they are."""

from typing import Any

import pytest

from serving.core import Mark, RemoteState
from serving.core.cache.content import Scope
from serving.core.cache.retention import MAX_MARKS, KeptStates, merged, written_tokens
from tests.serving.core.drive import Loop
from tests.serving.core.test_eviction import kept

PROMPT = [1 + i % 7 for i in range(30)]
MODES: list[dict[str, Any]] = [
    {},
    {"cache_mode": "align"},
    {"num_pages": 0},
    {"num_speculative_tokens": 2, "num_lookahead_tokens": 2},
    {"replay_interval": 2},
    {"max_num_batched_tokens": 3},
    {"page_size": 4},
    {"page_size": 4, "chunks_end_at_blocks": True},
    {"tile_size": 4, "state_block_size": 8},
]


def at(*positions: int, ttl: float | None = None) -> dict[int, Mark]:
    return merged(Mark(position, ttl) for position in positions)


@pytest.mark.parametrize("changes", MODES, ids=str)
def test_a_prompt_continues_from_the_marks_of_one_before(changes: dict[str, Any]) -> None:
    """At any position, within a tile or at its end, and with the output that it has without a cache."""
    loop = Loop(**changes)
    request = loop.run(PROMPT, max_tokens=2, marks=at(5, 7, 10, 29))
    assert {5, 7, 10, 29} <= set(loop.positions())
    assert list(request.lookup.published) == [5, 7, 10, 29]
    for shared in (5, 7, 10, 29):
        other = [*PROMPT[:shared], 9, 9, 9]
        assert loop.run(other, max_tokens=3).num_cached_tokens == shared
    all_kept = loop.config.cache_mode == "all"
    assert loop.run([*PROMPT[:9], 9], max_tokens=1).num_cached_tokens == (8 if all_kept else 7)


def test_a_preempted_request_publishes_its_marks_once_more() -> None:
    loop = Loop(num_pages=30, max_num_seqs=2)
    requests = [loop.add([n, *PROMPT[:20]], max_tokens=20, marks=at(5, 9)) for n in (8, 9)]
    loop.finish()
    assert any(request.queueing.num_preemptions for request in requests)
    for request in requests:
        loop.check_output(request)
        assert list(request.lookup.published) == [5, 9]


def test_marks_cost_no_step_if_they_are_cached_or_nothing_is() -> None:
    for loop in (Loop(), Loop(cache_mode="none")):
        loop.run(PROMPT, max_tokens=1, marks=at(7))
        loop.plans.clear()
        loop.run([*PROMPT, 9], max_tokens=1, marks=at(7))
        assert len(loop.plans) == 1


def test_a_state_is_kept_until_its_time_has_passed() -> None:
    """From its last use; then it goes as any other, even if no further request marks anything."""
    now = [0.0]
    loop = Loop(num_slots=12, max_num_seqs=1, clock=lambda: now[0])
    loop.run(PROMPT[:9], max_tokens=1, marks=at(7, ttl=60))

    def fill(first: int) -> None:
        for n in range(first, first + 40):
            loop.run([n, n, n, n, n], max_tokens=1)

    fill(100)
    assert 7 in kept(loop, PROMPT)
    now[0] = 50
    loop.run([*PROMPT[:7], 9], max_tokens=1, marks=at(7, ttl=60))
    now[0] = 100
    fill(200)
    assert 7 in kept(loop, PROMPT), "used 50 seconds ago"
    now[0] = 111
    fill(300)
    assert kept(loop, PROMPT) == []
    loop.scheduler.check(idle=True)


def test_no_client_takes_the_share_of_another() -> None:
    """One that marks everything keeps half of the spare slots; with another, the one with more loses its oldest."""
    loop = Loop(num_slots=22, max_num_seqs=1)
    most = loop.config.max_kept_states
    assert most == 10
    loop.run([9, 9, 9, 9, 9], max_tokens=1, client="a", marks=at(3, ttl=60))
    for n in range(10, 40):
        loop.run([n, n, n, n, n, n], max_tokens=1, client="b", marks=at(3, 5, ttl=60))
    assert 3 in kept(loop, [9] * 5)
    entries = loop.scheduler.index.by_worth()
    assert sum(entry.kept_until > 0 for entry in entries) == most
    assert len(entries) > most, "others have slots, too"


def test_pages_of_kept_states_are_evicted_last_and_bounded() -> None:
    """A kept state needs all pages before it, so long prompts keep fewer states; half of the pages stay for others."""
    loop = Loop(num_slots=60, num_pages=20, max_num_seqs=1)
    loop.run(PROMPT[:9], max_tokens=1, client="a", marks=at(7, ttl=60))
    for n in range(10, 40):
        loop.run([n] * 12, max_tokens=1, client="b")
    assert 7 in kept(loop, PROMPT)
    for n in range(10, 40):
        loop.run([n] * 16, max_tokens=1, client="b", marks=at(5, 13, 15, ttl=60))
    assert 7 in kept(loop, PROMPT), "the other client keeps more"
    assert sum(entry.position for entry in loop.scheduler.index.by_worth() if entry.kept_until) <= 20
    assert loop.run([9] * 30, max_tokens=8).output_token_ids, "a prompt gets all pages"


@pytest.mark.parametrize("change", ["weights", "state"])
def test_pages_of_kept_states_that_are_gone_or_stale_are_evicted_in_turn(change: str) -> None:
    """The weights change, or a state is dropped without its pages."""
    loop = Loop(num_pages=140, max_num_seqs=1, cache_mode="align", max_model_len=160)
    loop.run([1 + i % 7 for i in range(64)], max_tokens=1, marks=at(64, ttl=60))
    old = loop.entries()
    assert [entry.position for entry in old if entry.kept_until] == [64]
    if change == "weights":
        loop.change_weights()
    else:
        for entry in old:
            loop.index.drop_state(entry)
    assert not any(entry.kept_until for entry in old)
    loop.run([9] * 20, max_tokens=1)
    loop.run([8] * 150, max_tokens=1)
    loop.run([7] * 100, max_tokens=1)
    assert loop.index.find([9] * 20, Scope(None, loop.device.weights)).matched == 20
    loop.scheduler.check(idle=True)


def test_a_marked_state_that_comes_back_is_kept_again() -> None:
    """From a tier below the device, for the time and the client of the request that it is fetched for."""
    loop = Loop()
    request = loop.add(PROMPT[:9], max_tokens=1, client="a", marks=at(8, ttl=60))
    request.transfer.remote = RemoteState(8)
    assert loop.scheduler.schedule() is None
    (load,) = loop.scheduler.loads
    loop.scheduler.arrived(load)
    assert [entry.position for entry in loop.entries() if entry.kept_until] == [8]


def test_the_shares_of_clients_are_summed_as_states_come_and_go() -> None:
    states = KeptStates(3, 100.0, clock=lambda: 0.0)
    loop = Loop(cache_mode="all")
    loop.run(PROMPT, max_tokens=1)
    first, second, third, fourth, *_ = sorted(loop.entries(), key=lambda entry: entry.position)
    assert not any(states.keep(entry, 60, client) for entry, client in ((first, "a"), (second, "b"), (third, "b")))
    assert states.keep(second, 60, "b") == [], "kept again"
    assert states.keep(fourth, 60, "a") == [first], "of the two clients with two states, that with the oldest"
    assert states.keep(first, 60, "c") == [third]
    assert [states.forget(entry) for entry in (first, second, third, fourth)] == [True, True, False, True]
    assert states._total == 0
    assert not states._shares


def test_marks_of_one_salt_serve_no_other() -> None:
    loop = Loop()
    loop.run(PROMPT, max_tokens=1, cache_salt="a", marks=at(7, ttl=60))
    assert 7 in loop.positions("a")
    assert loop.positions() == loop.positions("b") == []
    assert loop.run(PROMPT[:8], max_tokens=1, cache_salt="b", marks=at(7, ttl=60)).num_cached_tokens == 0
    assert [entry.position for entry in loop.scheduler.index.by_worth() if entry.kept_until] == [7, 7]


def test_tokens_with_pages_and_no_state_are_counted() -> None:
    loop = Loop(cache_mode="align")
    loop.run(PROMPT, max_tokens=1)
    loop.run([*PROMPT[:23], 9], max_tokens=1)
    counted = loop.scheduler.stats()
    assert counted["stateless_tokens"] == 22 - counted["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("published", "cached", "written"),
    [
        ([], 5, {}),
        ([Mark(10, 300.0), Mark(30)], 0, {300.0: 10, None: 20}),
        ([Mark(10, 300.0), Mark(30, 3600.0)], 20, {3600.0: 10}),
        ([Mark(10, 300.0), Mark(30, 300.0), Mark(10), Mark(30, 60.0)], 4, {300.0: 26}),
    ],
)
def test_marks_are_merged_and_their_tokens_counted(published: list[Mark], cached: int, written: dict[Any, int]) -> None:
    assert written_tokens(merged(published), cached) == written
    assert list(at(*range(1, 20))) == list(range(20 - MAX_MARKS, 20))
