"""Who goes first when a pool runs dry."""

import random
from functools import partial

import pytest

from serving.core.cache.content import Scope
from serving.core.cache.eviction_queue import ABSENT_SECONDS
from serving.core.cache.retention import Mark
from tests.serving.core.drive import Loop


def kept(loop: Loop, prompt: list[int]) -> list[int]:
    """Positions of a prompt at which a state is still to be found."""
    found = {loop.index.find(prompt[:length], Scope(None)).position for length in range(1, len(prompt) + 1)}
    return sorted(found - {0})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pages", [0, 60])
def test_all_cached_prefixes_can_be_dropped_at_any_time(seed: int, pages: int) -> None:
    """Requests that run are not disturbed, and nothing that was cached before is found."""
    pick = random.Random(seed)
    loop = Loop(num_slots=20, num_pages=pages, max_num_seqs=3)
    requests = []
    for _ in range(4):
        for _ in range(3):
            prompt = [pick.randrange(1, 3)] * pick.randrange(1, 20)
            requests.append(loop.add(prompt, max_tokens=pick.randrange(1, 9)))
        loop.steps(pick.randrange(12))
        loop.scheduler.drop_cached()
        loop.scheduler.check()
        assert loop.positions() == []
    loop.finish()
    loop.scheduler.drop_cached()
    loop.scheduler.check(idle=True)
    assert loop.cached(requests[0].tokens[: requests[0].prompt_len]) == 0


def test_interior_states_go_before_the_end_of_an_older_chain() -> None:
    old, new = [1] * 3, [2] * 17
    loop = Loop(num_slots=8, max_num_seqs=1).run_each([old, new, [3] * 3, [4] * 3])
    assert kept(loop, old) == [3]
    assert kept(loop, new)[-2:] == [16, 17]


def test_a_branch_is_not_interior() -> None:
    loop = Loop(num_slots=40, max_num_seqs=1).run_each([1] * 8 + [branch] * 8 for branch in (2, 3))
    ranks = {entry.position: entry.rank for entry in loop.entries() if entry.tail == ()}
    assert ranks[4] == 0
    assert ranks[8] > ranks[4]


def test_least_recently_used_among_equals() -> None:
    a, b, c = [1] * 3, [2] * 3, [3] * 3
    loop = Loop(num_slots=5, max_num_seqs=1).run_each([a, b, a, c, [4] * 3])
    assert [bool(kept(loop, prompt)) for prompt in (a, b, c)] == [True, False, True]


def test_pages_go_tails_first_and_take_their_states_along() -> None:
    old = list(range(16))
    loop = Loop(num_pages=10, max_model_len=18, max_num_seqs=1).run_each([old])
    assert kept(loop, old) == [4, 8, 12, 16]
    loop.run([50] * 5, max_tokens=1)
    # 9 pages in all: 5 tokens took three, one was free.
    assert kept(loop, old) == [4, 8, 12]
    assert loop.cached(old) == 12


def test_a_modest_state_displaces_nothing_of_worth() -> None:
    ends = [[token] * 3 for token in range(4)]
    loop = Loop(num_slots=7, max_num_seqs=1).run_each(ends)
    # Two slots are free, for the row and for its prompt's end; only the last boundary displaces a state.
    loop.run([9] * 19, max_tokens=1)
    assert kept(loop, [9] * 19) == [16, 19]
    assert [bool(kept(loop, prompt)) for prompt in ends] == [False, True, True, True]


def test_checkpoints_never_block_admission() -> None:
    loop = Loop(num_slots=5, max_num_seqs=4).run_each([token] * 9 for token in range(6))
    requests = [loop.add([10 + token] * 3, max_tokens=4) for token in range(4)]
    loop.step()
    assert all(request.progress.row_id for request in requests)
    loop.finish()


@pytest.mark.smoke
@pytest.mark.parametrize(("slots", "share"), [(41, 0.95), (400, 0.95), (24, 0.8)])
def test_round_robin_of_conversations(slots: int, share: float) -> None:
    """Eight conversations take turns; how much of what an unlimited cache would reuse is reused."""
    loop = Loop(
        num_slots=slots, num_pages=0, max_num_seqs=2, max_model_len=600, max_num_batched_tokens=512,
        state_block_size=16, tile_size=8,
    )  # fmt: skip
    rng = random.Random(5)
    talks = [[rng.randrange(1000) for _ in range(60)] for _ in range(8)]
    reused = possible = 0
    for turn in range(6):
        for talk in talks:
            # Everything up to the last boundary that the turn before computed could be there: prompt, answer but one.
            before = len(talk) - 21 if turn else 0
            request = loop.run(talk, max_tokens=20)
            possible += before - before % 16
            reused += request.lookup.num_cached_tokens
            talk[:] = [*request.tokens, *[rng.randrange(1000) for _ in range(20)]]
    assert reused >= share * possible, (reused, possible)


# -- worth --


def test_a_prompt_end_that_a_conversation_went_on_from_goes_before_other_ends() -> None:
    other = [9] * 3
    loop = Loop(num_slots=6, max_num_seqs=1).run_each([other])
    talk = [1] * 3
    for _ in range(3):
        request = loop.run(talk, max_tokens=1)
        talk = [*request.tokens, 5]
    # Ends at 3, 5 and 7 and the boundary 4; only the last end is of use, and the other prompt is older than all.
    loop.run([7] * 3, max_tokens=1)
    assert loop.positions()[-1] == 7
    assert loop.cached(other) == 3


def test_a_prompt_that_is_asked_again_and_again_is_not_passed() -> None:
    prompt = [1] * 3
    # Its answer crosses a boundary, so that there is a deeper state.
    loop = Loop(num_slots=6, max_num_seqs=1).run_each([prompt] * 3, max_tokens=8)
    loop.run_each([token + 4] * 2 for token in range(4))
    assert loop.cached(prompt) == 3


def test_what_many_begin_with_outlives_how_they_end() -> None:
    system = [1] * 16
    loop = Loop(num_slots=7, max_num_seqs=1).run_each([*system, token + 2] for token in range(4))
    for token in range(40):
        loop.run([token + 30] * 2, max_tokens=1)
        if token % 10 == 9:
            assert loop.cached([*system, token + 30]) == 16


def test_nothing_stays_unused_for_ever() -> None:
    system = [1] * 16
    loop = Loop(num_slots=7, num_pages=0, max_num_seqs=1).run_each([*system, token + 2] for token in range(4))
    assert loop.cached([*system, 20]) == 16
    loop.run_each([token + 30] * 12 for token in range(150))
    assert loop.cached([*system, 21]) == 0


def test_a_request_that_could_not_be_admitted_is_no_hit() -> None:
    prompt = [1] * 8
    loop = Loop(num_slots=20, num_pages=12, max_num_seqs=2).run_each([prompt])
    entry = loop.index.find(prompt, Scope(None)).entry
    assert entry is not None
    first = loop.add([2] * 12, max_tokens=8)
    loop.step()
    loop.add([*prompt, *[3] * 10], max_tokens=1)
    while not first.finished:
        assert entry.hits == 0
        loop.step()
    loop.finish()
    assert entry.hits <= 1


# -- shares of clients --


def flood(loop: Loop, turns: int, client: str | None = "attacker", length: int = 6) -> None:
    """A stream of fresh prompts."""
    loop.run_each(([n] * length for n in range(100, 100 + turns)), max_tokens=2, client=client)


@pytest.mark.parametrize("sizes", [{"num_slots": 24}, {"num_pages": 40}, {"num_slots": 24, "num_pages": 0}], ids=str)
@pytest.mark.parametrize("mode", ["all", "align"])
def test_a_client_below_its_share_loses_nothing_to_others(sizes: dict[str, int], mode: str) -> None:
    loop = Loop(max_num_seqs=2, cache_mode=mode, clock=lambda: 0.0, **sizes)
    flood(loop, 30)
    talks = {"victim": [1] * 17, "other": [2] * 9}
    for client, talk in talks.items():
        loop.run(talk, max_tokens=4, client=client)
    held = {client: positions(loop, client) for client in talks}
    flood(loop, 60)
    assert {client: positions(loop, client) for client in talks} == held
    for client, talk in talks.items():
        assert loop.run(talk, max_tokens=4, client=client).lookup.num_cached_tokens >= len(talk) - 1
    assert loop.scheduler.stats()["states_evicted"] > 100


def positions(loop: Loop, client: str) -> list[int]:
    """Those of the states that count for a client."""
    return sorted(entry.position for entry in loop.index.by_worth() if entry.client == client)


def pages_of(loop: Loop, client: str | None) -> int:
    """Number of pages that count for a client."""
    return sum(owner is not None and owner.client == client for owner in loop.scheduler.cache.pages.owners)


def test_the_most_valuable_states_of_clients_are_named_in_turn() -> None:
    loop = Loop(cache_mode="align")
    for client, prompts in {"many": range(5), "one": [7]}.items():
        loop.run_each(([token] * 3 for token in prompts), client=client)
    assert sorted(str(entry.client) for entry in loop.index.by_worth()[:2]) == ["many", "one"]


def test_the_store_is_divided_equally_and_one_client_alone_has_all() -> None:
    loop = Loop(num_slots=34, num_pages=0, cache_mode="align", max_num_seqs=1, clock=lambda: 0.0)
    flood(loop, 60, "a", 3)
    assert len(positions(loop, "a")) == 33, "all slots"
    for turn in range(60):
        for client in "bc":
            loop.run([ord(client), turn, 5], max_tokens=1, client=client)
    counts = [len(positions(loop, client)) for client in "abc"]
    assert sum(counts) == 32
    assert max(counts) - min(counts) <= 2, "a row takes two slots at once"


def test_what_two_clients_use_counts_for_the_first() -> None:
    loop = Loop().run_each([[1] * 3], client="a")
    assert loop.cached([1] * 3, client="b") == 3
    assert (positions(loop, "a"), positions(loop, "b")) == ([3], [])


def test_a_client_that_is_absent_for_an_hour_gives_up_its_share() -> None:
    now = [0.0]
    loop = Loop(num_slots=12, num_pages=0, max_num_seqs=1, clock=lambda: now[0]).run_each([[1] * 3], client="absent")
    loop.run([2] * 2, max_tokens=1, client="absent", marks={2: Mark(2, 2 * ABSENT_SECONDS)})
    for at in (0.0, ABSENT_SECONDS, ABSENT_SECONDS + 1):
        now[0] = at
        flood(loop, 20, length=3)
        assert positions(loop, "absent") == ([2] if at > ABSENT_SECONDS else [2, 3]), "a mark keeps one of them"


@pytest.mark.parametrize("sizes", [{"num_slots": 24}, {"num_slots": 200, "num_pages": 60}], ids=str)
def test_an_absent_client_gives_up_whole_chains(sizes: dict[str, int]) -> None:
    """Evicting an entry changes the places of those above it, which is no use of them."""
    now = [0.0]
    loop = Loop(max_num_seqs=1, clock=lambda: now[0], **sizes)
    loop.run_each([[1] * 24, [1] * 24 + [3] * 10], client="absent")
    flood(loop, 30)
    assert len(positions(loop, "absent")) > 3
    now[0] = ABSENT_SECONDS + 1
    flood(loop, 30)
    assert positions(loop, "absent") == []
    assert pages_of(loop, "absent") == 0 or "num_pages" not in sizes


@pytest.mark.parametrize("clients", ["abcd", [None]], ids=str)
def test_pages_of_replaced_weights_go_first(clients: list[str | None]) -> None:
    """Also those without a state, and of clients that hold less than the one that adds entries."""
    loop = Loop(num_slots=300, num_pages=101, max_num_seqs=1, clock=lambda: 0.0)
    for n in range(100):
        loop.run([n, 5, 6, 7, 8, 9], max_tokens=1, client=clients[n % len(clients)])
    assert sum(map(partial(pages_of, loop), clients)) == 100
    loop.change_weights()
    loop.run_each(([n, 5, 6, 7, 8, 9] for n in range(60)), client="z")
    assert pages_of(loop, "z") == 100


def test_nothing_is_evicted_for_a_member_that_has_nothing_cached() -> None:
    """All pages of one member of context parallelism are in use: evicting those of others would not help."""
    loop = Loop(num_slots=300, num_pages=32, context_members=4, max_num_seqs=16)
    loop.run_each([7, 8, token, token, token] for token in range(5))
    loop.add([7, 8, 50], max_tokens=20)
    loop.step()
    pages = loop.scheduler.cache.pages
    while pages.free_of[0]:
        pages.take(0)
    before = list(pages.cached_of)
    assert sum(before) > before[0] == 0
    assert pages.take(0) == 0
    assert pages.cached_of == before
    assert pages.take(1)
