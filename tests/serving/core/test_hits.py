"""What a prompt can reuse, and what it is told if that is nothing."""

from typing import Any

import pytest

from serving.core.cache.content import Scope
from serving.core.cache.retention import MAX_MARKS, KeptStates, Mark, merged, written_tokens
from serving.core.errors import MissReason
from serving.core.requests.request import RemoteState
from tests.serving.core.drive import Loop
from tests.serving.core.test_eviction import kept

PROMPT = list(range(100, 111))  # 11 tokens: B = 4, so boundaries at 4 and 8, and its end inside a page


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("pages", [0, 200])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:8]], ids=["end inside a page", "whole blocks"])
def test_repeated_prompt_computes_nothing(mode: str, pages: int, prompt: list[int]) -> None:
    loop = Loop(cache_mode=mode, num_pages=pages)
    first = loop.run(prompt, max_tokens=3)
    assert first.lookup.num_cached_tokens == 0
    again = loop.run(prompt, max_tokens=3)
    assert again.lookup.num_cached_tokens == len(prompt)
    assert again.lookup.miss_reason is None
    (row,) = loop.plans[0].decode
    assert (row.num_tokens, row.access.writes, row.sample, row.is_prefill) == (0, (), True, True)
    assert loop.scheduler.stats()["full_hits"] == 1


@pytest.mark.parametrize(("mode", "states"), [("none", []), ("align", [8, 11]), ("all", [4, 8, 11])])
def test_what_a_prompt_publishes(mode: str, states: list[int]) -> None:
    loop = Loop(cache_mode=mode).run_each([PROMPT])
    if mode == "none":
        assert loop.scheduler.index is None
        assert loop.run(PROMPT, max_tokens=1).lookup.miss_reason is MissReason.CACHING_OFF
    else:
        assert loop.positions() == states


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("rightness", [0.0, 0.6, 1.0])
def test_second_turn_hits_a_block_finished_while_decoding(drafts: int, rightness: float) -> None:
    loop = Loop(num_speculative_tokens=drafts, num_lookahead_tokens=drafts, rightness=rightness)
    first = loop.run(PROMPT, max_tokens=11)
    # The last output token is never fed: boundaries up to token 21 exist.
    assert loop.positions() == [4, 8, 11, 12, 16, 20]
    assert loop.cached([*first.tokens, 1, 2], max_tokens=5) == 20


def test_second_turn_hits_a_block_finished_while_decoding_with_three_drafts() -> None:
    test_second_turn_hits_a_block_finished_while_decoding(3, 0.6)


def test_one_token_behind_a_cached_block_is_a_decode_row() -> None:
    loop = Loop(cache_mode="align").run_each([PROMPT[:8]])
    assert loop.cached(PROMPT[:9], max_tokens=2) == 8
    assert not loop.plans[0].prefill
    (row,) = loop.plans[0].decode
    assert (row.length, row.num_tokens, row.num_drafts, list(row.tokens)) == (8, 1, 0, [PROMPT[8]])


def test_short_tail_is_a_decode_row_with_drafts_on_and_a_prefill_row_without() -> None:
    for drafts, decoding in ((0, False), (2, True)):
        loop = Loop(num_speculative_tokens=drafts).run_each([PROMPT[:8]])
        loop.run(PROMPT, max_tokens=2)
        assert bool(loop.plans[0].decode) == decoding
        assert bool(loop.plans[0].prefill) != decoding


def test_twins_of_one_step_do_not_read_each_other() -> None:
    loop = Loop()
    first, second = loop.add(PROMPT, max_tokens=2), loop.add(PROMPT, max_tokens=2)
    loop.finish()
    assert (first.lookup.num_cached_tokens, second.lookup.num_cached_tokens) == (0, 0)
    assert second.lookup.miss_reason is MissReason.NOT_YET_WRITTEN
    assert loop.cached(PROMPT) == len(PROMPT)


def test_twins_hold_their_prompt_once() -> None:
    loop = Loop()
    requests = [loop.add(PROMPT, max_tokens=9) for _ in range(3)]
    while not all(request.output_token_ids for request in requests):
        loop.step()
    assert len({tuple(request.progress.pages.table[: len(PROMPT) // 2]) for request in requests}) == 1
    # Five full pages, one tail in the index, and what each goes on to write.
    assert loop.scheduler.stats()["pages"]["used"] <= 5 + 1 + 3 * 2
    loop.finish()


def test_align_publishes_the_junction_of_two_prompts() -> None:
    loop = Loop(cache_mode="align").run_each([PROMPT])
    # Equal up to token 10, that is 5 pages; the deepest common state is at 8.
    assert loop.cached([*PROMPT[:10], 1, 2, 3, 4, 5]) == 8
    assert 10 in loop.positions()
    assert loop.cached([*PROMPT[:10], 7, 7, 7]) == 10


def test_salt_separates() -> None:
    loop = Loop().run_each([PROMPT])
    salted = loop.run(PROMPT, max_tokens=1, cache_salt="a")
    assert (salted.lookup.num_cached_tokens, salted.lookup.miss_reason) == (0, MissReason.SALT_DIFFERS)
    assert loop.cached(PROMPT, cache_salt="a") == len(PROMPT)
    # What a salt holds is not told to others.
    private = [9, 9, 9, 9, 9, 9, 9, 9]
    for salt in (None, "b"):
        loop = Loop().run_each([private], cache_salt="a")
        assert loop.run(private, max_tokens=1, cache_salt=salt).lookup.miss_reason is MissReason.NOT_FOUND


def test_reasons() -> None:
    loop = Loop()
    assert loop.run(PROMPT, max_tokens=1).lookup.miss_reason is MissReason.NOT_FOUND
    assert loop.run([1, 2], max_tokens=1).lookup.miss_reason is MissReason.TOO_SHORT
    # Shares a page, but no state lies that early.
    assert loop.run([*PROMPT[:3], 5, 5, 5, 5, 5], max_tokens=1).lookup.miss_reason is MissReason.TOO_SHORT
    asked = loop.run(PROMPT, max_tokens=1, prompt_logprobs=True)
    assert (asked.lookup.num_cached_tokens, asked.lookup.miss_reason) == (0, MissReason.PROMPT_LOGPROBS)


def test_reason_state_evicted() -> None:
    loop = Loop(num_slots=4, max_num_seqs=1).run_each([PROMPT[:8]]).run_each([start] * 8 for start in (1, 2, 3))
    missed = loop.run(PROMPT[:8], max_tokens=1)
    assert (missed.lookup.num_cached_tokens, missed.lookup.miss_reason) == (0, MissReason.STATE_EVICTED)


def test_states_of_old_weights_go_first() -> None:
    loop = Loop()
    loop.run(PROMPT)
    loop.change_weights()
    fresh = [(t + 1) % 9 for t in PROMPT]
    loop.run(fresh)
    kept = loop.positions()
    old = len(loop.positions(weights=0))
    assert old > 1
    for count in range(1, old + 1):
        assert loop.index.evict_state()
        assert (len(loop.positions(weights=0)), loop.positions()) == (old - count, kept)


MARKED = [1 + i % 7 for i in range(30)]
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
    request = loop.run(MARKED, max_tokens=2, marks=at(5, 7, 10, 29))
    assert {5, 7, 10, 29} <= set(loop.positions())
    assert list(request.lookup.published) == [5, 7, 10, 29]
    for shared in (5, 7, 10, 29):
        assert loop.cached([*MARKED[:shared], 9, 9, 9], max_tokens=3) == shared
    all_kept = loop.config.cache_mode == "all"
    assert loop.cached([*MARKED[:9], 9]) == (8 if all_kept else 7)


def test_a_preempted_request_publishes_its_marks_once_more() -> None:
    loop = Loop(num_pages=30, max_num_seqs=2)
    requests = [loop.add([n, *MARKED[:20]], max_tokens=20, marks=at(5, 9)) for n in (8, 9)]
    loop.finish()
    assert any(request.queueing.num_preemptions for request in requests)
    assert [list(request.lookup.published) for request in requests] == [[5, 9]] * 2


def test_marks_cost_no_step_if_they_are_cached_or_nothing_is() -> None:
    for loop in (Loop(), Loop(cache_mode="none")):
        loop.run(MARKED, max_tokens=1, marks=at(7))
        loop.run([*MARKED, 9], max_tokens=1, marks=at(7))
        assert len(loop.plans) == 1


def test_a_state_is_kept_until_its_time_has_passed() -> None:
    """From its last use; then it goes as any other, even if no further request marks anything."""
    now = [0.0]
    loop = Loop(num_slots=12, max_num_seqs=1, clock=lambda: now[0]).run_each([MARKED[:9]], marks=at(7, ttl=60))

    def fill(first: int) -> None:
        loop.run_each([n] * 5 for n in range(first, first + 40))

    fill(100)
    assert 7 in kept(loop, MARKED)
    now[0] = 50
    loop.run([*MARKED[:7], 9], max_tokens=1, marks=at(7, ttl=60))
    now[0] = 100
    fill(200)
    assert 7 in kept(loop, MARKED), "used 50 seconds ago"
    now[0] = 111
    fill(300)
    assert kept(loop, MARKED) == []
    loop.scheduler.check(idle=True)


def test_no_client_takes_the_share_of_another() -> None:
    """One that marks everything keeps half of the spare slots; with another, the one with more loses its oldest."""
    loop = Loop(num_slots=22, max_num_seqs=1)
    most = loop.config.max_kept_states
    assert most == 10
    loop.run([9, 9, 9, 9, 9], max_tokens=1, client="a", marks=at(3, ttl=60))
    loop.run_each(([n] * 6 for n in range(10, 40)), client="b", marks=at(3, 5, ttl=60))
    assert 3 in kept(loop, [9] * 5)
    entries = loop.scheduler.index.by_worth()
    assert sum(entry.kept_until > 0 for entry in entries) == most
    assert len(entries) > most, "others have slots, too"


def test_pages_of_kept_states_are_evicted_last_and_bounded() -> None:
    """A kept state needs all pages before it, so long prompts keep fewer states; half of the pages stay for others."""
    loop = Loop(num_slots=60, num_pages=20, max_num_seqs=1)
    loop.run(MARKED[:9], max_tokens=1, client="a", marks=at(7, ttl=60))
    loop.run_each(([n] * 12 for n in range(10, 40)), client="b")
    assert 7 in kept(loop, MARKED)
    loop.run_each(([n] * 16 for n in range(10, 40)), client="b", marks=at(5, 13, 15, ttl=60))
    assert 7 in kept(loop, MARKED), "the other client keeps more"
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
    loop.run_each([[9] * 20, [8] * 150, [7] * 100])
    assert loop.index.find([9] * 20, Scope(None, loop.device.weights)).matched == 20
    loop.scheduler.check(idle=True)


def test_a_marked_state_that_comes_back_is_kept_again() -> None:
    """From a tier below the device, for the time and the client of the request that it is fetched for."""
    loop = Loop()
    request = loop.add(MARKED[:9], max_tokens=1, client="a", marks=at(8, ttl=60))
    request.transfer.remote = RemoteState(8)
    assert loop.scheduler.schedule() is None
    (load,) = loop.scheduler.loads
    loop.scheduler.arrived(load)
    assert [entry.position for entry in loop.entries() if entry.kept_until] == [8]


def test_a_state_whose_page_a_row_takes_over_is_not_kept() -> None:
    """Its request needs all pages, so none is left for a copy of the page that holds the state's tail."""
    loop = Loop(num_pages=5, max_model_len=9, max_num_seqs=1).run_each([MARKED[:3]])
    assert loop.cached(MARKED[:8], marks=at(3, ttl=60)) == 3
    assert 3 not in loop.positions()
    assert loop.index._kept._clients.keys() <= set(loop.entries())


def test_the_shares_of_clients_are_summed_as_states_come_and_go() -> None:
    states = KeptStates(3, 100.0, clock=lambda: 0.0)
    loop = Loop(cache_mode="all").run_each([MARKED])
    first, second, third, fourth, *_ = sorted(loop.entries(), key=lambda entry: entry.position)
    assert not any(states.keep(entry, 60, client) for entry, client in ((first, "a"), (second, "b"), (third, "b")))
    assert states.keep(second, 60, "b") == [], "kept again"
    assert states.keep(fourth, 60, "a") == [first], "of the two clients with two states, that with the oldest"
    assert states.keep(first, 60, "c") == [third]
    assert [states.forget(entry) for entry in (first, second, third, fourth)] == [True, True, False, True]
    assert states._total == 0
    assert not states._shares


def test_marks_of_one_salt_serve_no_other() -> None:
    loop = Loop().run_each([MARKED], cache_salt="a", marks=at(7, ttl=60))
    assert 7 in loop.positions("a")
    assert loop.positions() == loop.positions("b") == []
    assert loop.cached(MARKED[:8], cache_salt="b", marks=at(7, ttl=60)) == 0
    assert [entry.position for entry in loop.scheduler.index.by_worth() if entry.kept_until] == [7, 7]


def test_tokens_with_pages_and_no_state_are_counted() -> None:
    counted = Loop(cache_mode="align").run_each([MARKED, [*MARKED[:23], 9]]).scheduler.stats()
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
