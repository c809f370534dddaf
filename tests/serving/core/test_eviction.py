"""Who goes first when a pool runs dry."""

import random

import pytest

from serving.core.cache.content import Scope
from tests.serving.core.drive import Loop


def kept(loop: Loop, prompt: list[int]) -> list[int]:
    """Positions of a prompt at which a state is still to be found."""
    index = loop.scheduler.index
    assert index is not None
    found, limit = [], len(prompt)
    while limit:
        match = index.find(prompt[:limit], Scope(None))
        if match.entry is None:
            break
        found.append(match.entry.position)
        limit = match.entry.position - 1
    return found[::-1]


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
        for _ in range(pick.randrange(12)):
            loop.step()
        loop.scheduler.drop_cached()
        loop.scheduler.check()
        assert loop.positions() == []
    loop.finish()
    for request in requests:
        loop.check_output(request)
    loop.scheduler.drop_cached()
    loop.scheduler.check(idle=True)
    again = loop.run(requests[0].tokens[: requests[0].prompt_len], max_tokens=1)
    assert again.lookup.num_cached_tokens == 0


def test_interior_states_of_a_chain_go_first() -> None:
    loop = Loop(num_slots=8, max_num_seqs=1)
    old, new = [1] * 17, [2] * 5
    loop.run(old, max_tokens=1)
    assert kept(loop, old) == [4, 8, 12, 16, 17]
    loop.run(new, max_tokens=1)
    # Deeper than 4, 8 and 12 there is one state each: those go, oldest first. The chain's end stays.
    assert kept(loop, old)[-2:] == [16, 17]
    assert kept(loop, new)[-1] == 5
    loop.run([3] * 5, max_tokens=1)
    assert kept(loop, old)[-1] == 17


def test_interior_states_go_before_the_end_of_an_older_chain() -> None:
    loop = Loop(num_slots=8, max_num_seqs=1)
    old, new = [1] * 3, [2] * 17
    loop.run(old, max_tokens=1)
    loop.run(new, max_tokens=1)
    for token in (3, 4):
        loop.run([token] * 3, max_tokens=1)
    assert kept(loop, old) == [3]
    assert kept(loop, new)[-2:] == [16, 17]


def test_a_branch_is_not_interior() -> None:
    loop = Loop(num_slots=40, max_num_seqs=1)
    stem = [1] * 8
    for branch in (2, 3):
        loop.run([*stem, *[branch] * 8], max_tokens=1)
    index = loop.scheduler.index
    assert index is not None
    ranks = {entry.position: entry.rank for entry in _entries(loop) if entry.tail == ()}
    assert ranks[4] == 0
    assert ranks[8] > ranks[4]


def test_least_recently_used_among_equals() -> None:
    loop = Loop(num_slots=5, max_num_seqs=1)
    a, b, c = [1] * 3, [2] * 3, [3] * 3
    for prompt in (a, b, a, c):
        loop.run(prompt, max_tokens=1)
    loop.run([4] * 3, max_tokens=1)
    assert [bool(kept(loop, prompt)) for prompt in (a, b, c)] == [True, False, True]


def test_pages_go_tails_first_and_take_their_states_along() -> None:
    loop = Loop(num_pages=10, max_model_len=18, max_num_seqs=1)
    old = list(range(16))
    loop.run(old, max_tokens=1)
    assert kept(loop, old) == [4, 8, 12, 16]
    loop.run([50] * 5, max_tokens=1)
    # 9 pages in all: 5 tokens took three, one was free.
    assert kept(loop, old) == [4, 8, 12]
    assert loop.run(old, max_tokens=1).num_cached_tokens == 12


def test_a_modest_state_displaces_nothing_of_worth() -> None:
    loop = Loop(num_slots=7, max_num_seqs=1)
    ends = [[token] * 3 for token in range(5)]
    for prompt in ends[:4]:
        loop.run(prompt, max_tokens=1)
    # Two slots are free, for the row and for its prompt's end; only the last boundary displaces a state.
    loop.run([9] * 19, max_tokens=1)
    assert kept(loop, [9] * 19) == [16, 19]
    assert [bool(kept(loop, prompt)) for prompt in ends[:4]] == [False, True, True, True]


def test_checkpoints_never_block_admission() -> None:
    loop = Loop(num_slots=5, max_num_seqs=4)
    for token in range(6):
        loop.run([token] * 9, max_tokens=1)
    requests = [loop.add([10 + token] * 3, max_tokens=4) for token in range(4)]
    loop.step()
    assert all(request.progress.row_id for request in requests)
    loop.finish()


@pytest.mark.parametrize(("slots", "share"), [(400, 0.95), (41, 0.95), (24, 0.8)])
def test_round_robin_of_conversations(slots: int, share: float) -> None:
    """Eight conversations take turns; how much of what an unlimited cache would reuse is reused."""
    loop = Loop(
        num_slots=slots,
        num_pages=0,
        max_num_seqs=2,
        max_model_len=600,
        max_num_batched_tokens=512,
        state_block_size=16,
        tile_size=8,
    )
    rng = random.Random(5)
    talks = [[rng.randrange(1000) for _ in range(60)] for _ in range(8)]
    reused = possible = 0
    for turn in range(6):
        for talk in talks:
            # Everything up to the last boundary that the turn before computed could be there: prompt, answer but one.
            before = len(talk) - 21 if turn else 0
            request = loop.run(talk, max_tokens=20)
            possible += before - before % 16
            reused += request.num_cached_tokens
            talk[:] = [*request.tokens, *[rng.randrange(1000) for _ in range(20)]]
    assert reused >= share * possible, (reused, possible)


def _entries(loop: Loop) -> list:
    index = loop.scheduler.index
    assert index is not None
    found: list = []
    stack: list = list(index.roots.values())
    while stack:
        node = stack.pop()
        found += node.states.values()
        stack += node.children.values()
    return found
