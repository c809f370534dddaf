"""What a prompt can reuse, and what it is told if that is nothing."""

import pytest

from serving.core import MissReason
from serving.core.cache.content import Scope
from tests.serving.core.drive import Loop

PROMPT = list(range(100, 111))  # 11 tokens: B = 4, so boundaries at 4 and 8, and its end inside a page


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("pages", [0, 200])
def test_repeated_prompt_computes_nothing(mode: str, pages: int) -> None:
    loop = Loop(cache_mode=mode, num_pages=pages)
    first = loop.run(PROMPT, max_tokens=3)
    assert first.num_cached_tokens == 0
    loop.plans.clear()
    again = loop.run(PROMPT, max_tokens=3)
    assert again.num_cached_tokens == len(PROMPT)
    assert again.miss_reason is None
    (row,) = loop.plans[0].decode
    assert (row.num_tokens, row.access.writes, row.sample, row.continues) == (0, (), True, False)
    assert loop.scheduler.stats()["full_hits"] == 1


def test_step_after_whole_hit_copies_the_tail_page_and_reads_the_checkpoint() -> None:
    loop = Loop()
    loop.run(PROMPT, max_tokens=2)
    loop.plans.clear()
    loop.run(PROMPT, max_tokens=3)
    sampled, fed = loop.plans[0].decode[0], loop.plans[1].decode[0]
    assert sampled.page_copy is None
    assert fed.continues
    assert fed.page_copy is not None
    assert fed.page_copy[0] != fed.page_copy[1]
    assert sampled.access.read not in fed.access.writes


@pytest.mark.parametrize(
    ("mode", "states"),
    [("none", []), ("align", [8, 11]), ("all", [4, 8, 11])],
)
def test_what_a_prompt_publishes(mode: str, states: list[int]) -> None:
    loop = Loop(cache_mode=mode)
    loop.run(PROMPT, max_tokens=1)
    if mode == "none":
        assert loop.scheduler.index is None
        assert loop.run(PROMPT, max_tokens=1).miss_reason is MissReason.CACHING_OFF
    else:
        assert loop.positions() == states


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("rightness", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_second_turn_hits_a_block_finished_while_decoding(drafts: int, rightness: float, overlap: bool) -> None:
    loop = Loop(num_speculative_tokens=drafts, num_lookahead_tokens=drafts, rightness=rightness, overlap=overlap)
    first = loop.run(PROMPT, max_tokens=11)
    # The last output token is never fed: boundaries up to token 21 exist.
    assert loop.positions() == [4, 8, 11, 12, 16, 20]
    second = loop.run([*first.tokens, 1, 2], max_tokens=5)
    assert second.num_cached_tokens == 20


def test_second_turn_hits_a_block_finished_while_decoding_with_three_drafts() -> None:
    test_second_turn_hits_a_block_finished_while_decoding(3, 0.6, True)


def test_one_token_behind_a_cached_block_is_a_decode_row() -> None:
    loop = Loop(cache_mode="align")
    loop.run(PROMPT[:8], max_tokens=1)
    loop.plans.clear()
    request = loop.run(PROMPT[:9], max_tokens=2)
    assert request.num_cached_tokens == 8
    assert not loop.plans[0].prefill
    (row,) = loop.plans[0].decode
    assert (row.length, row.num_tokens, row.num_drafts, list(row.tokens)) == (8, 1, 0, [PROMPT[8]])


def test_short_tail_is_a_decode_row_with_drafts_on_and_a_prefill_row_without() -> None:
    for drafts, decoding in ((0, False), (2, True)):
        loop = Loop(num_speculative_tokens=drafts)
        loop.run(PROMPT[:8], max_tokens=1)
        loop.plans.clear()
        loop.run(PROMPT, max_tokens=2)
        assert bool(loop.plans[0].decode) == decoding
        assert bool(loop.plans[0].prefill) != decoding


def test_prompt_of_whole_blocks_needs_no_column_before() -> None:
    loop = Loop(cache_mode="align")
    loop.run(PROMPT[:8], max_tokens=1)
    assert loop.run(PROMPT[:8], max_tokens=1).num_cached_tokens == 8


def test_first_token_is_never_a_decode_row() -> None:
    loop = Loop(num_speculative_tokens=3)
    loop.run([5], max_tokens=2)
    assert loop.plans[0].prefill[0].num_tokens == 1
    assert not loop.plans[0].decode


def test_twins_of_one_step_do_not_read_each_other() -> None:
    loop = Loop()
    first, second = loop.add(PROMPT, max_tokens=2), loop.add(PROMPT, max_tokens=2)
    loop.finish()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert second.miss_reason is MissReason.NOT_YET_WRITTEN
    assert loop.run(PROMPT, max_tokens=1).num_cached_tokens == len(PROMPT)


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
    loop = Loop(cache_mode="align")
    loop.run(PROMPT, max_tokens=1)
    # Equal up to token 10, that is 5 pages; the deepest common state is at 8.
    other = [*PROMPT[:10], 1, 2, 3, 4, 5]
    assert loop.run(other, max_tokens=1).num_cached_tokens == 8
    assert 10 in loop.positions()
    third = [*PROMPT[:10], 7, 7, 7]
    assert loop.run(third, max_tokens=1).num_cached_tokens == 10


def test_salt_separates() -> None:
    loop = Loop()
    loop.run(PROMPT, max_tokens=1)
    salted = loop.run(PROMPT, max_tokens=1, cache_salt="a")
    assert (salted.num_cached_tokens, salted.miss_reason) == (0, MissReason.SALT_DIFFERS)
    assert loop.run(PROMPT, max_tokens=1, cache_salt="a").num_cached_tokens == len(PROMPT)
    # What a salt holds is not told to others.
    private = [9, 9, 9, 9, 9, 9, 9, 9]
    loop.run(private, max_tokens=1, cache_salt="a")
    for salt in (None, "b"):
        assert loop.run(private, max_tokens=1, cache_salt=salt).miss_reason is MissReason.NOT_FOUND
        loop = Loop()
        loop.run(private, max_tokens=1, cache_salt="a")


def test_reasons() -> None:
    loop = Loop()
    assert loop.run(PROMPT, max_tokens=1).miss_reason is MissReason.NOT_FOUND
    assert loop.run([1, 2], max_tokens=1).miss_reason is MissReason.TOO_SHORT
    # Shares a page, but no state lies that early.
    assert loop.run([*PROMPT[:3], 5, 5, 5, 5, 5], max_tokens=1).miss_reason is MissReason.TOO_SHORT
    asked = loop.run(PROMPT, max_tokens=1, prompt_logprobs=True)
    assert (asked.num_cached_tokens, asked.miss_reason) == (0, MissReason.PROMPT_LOGPROBS)


def test_reason_state_evicted() -> None:
    loop = Loop(num_slots=4, max_num_seqs=1)
    loop.run(PROMPT[:8], max_tokens=1)
    for start in (1, 2, 3):
        loop.run([start] * 8, max_tokens=1)
    missed = loop.run(PROMPT[:8], max_tokens=1)
    assert (missed.num_cached_tokens, missed.miss_reason) == (0, MissReason.STATE_EVICTED)


def test_state_evicted_falls_back_to_a_shallower_state() -> None:
    loop = Loop()
    loop.run(PROMPT, max_tokens=1)
    match = loop.index.find(PROMPT, Scope(None))
    assert match.entry is not None
    loop.index.drop_state(match.entry)
    assert loop.run(PROMPT, max_tokens=1).num_cached_tokens == 8


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
