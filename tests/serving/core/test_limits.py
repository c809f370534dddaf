"""Settings, budgets, lengths, fairness, refusals, and which requests are preempted."""

from typing import Any

import pytest

from serving.core.errors import ConfigError, FinishReason, MissReason, RequestError
from serving.core.planning.plan import StepPlan
from serving.core.requests.request import Status
from tests.serving.core.drive import Loop, small_config


def test_a_prefill_gets_its_share_while_others_decode_the_budget_away() -> None:
    loop = Loop(max_num_seqs=4, max_num_batched_tokens=3, cache_mode="align")
    talkers = [loop.add([token], max_tokens=60) for token in range(3)]
    while any(not request.output_token_ids for request in talkers):
        loop.step()
    prompt = loop.add(list(range(9)), max_tokens=1)
    loop.steps(12)
    assert prompt.finished
    assert not any(request.finished for request in talkers)
    loop.finish()


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_block_larger_than_the_budget(mode: str) -> None:
    loop = Loop(max_num_batched_tokens=3, state_block_size=8, cache_mode=mode)
    request = loop.run(list(range(21)), max_tokens=2)
    ends = [row.end for plan in loop.plans for row in plan.prefill]
    assert len(ends) > 6
    if mode == "align":
        assert {8, 16} <= set(ends)
        assert loop.positions() == [8, 16, 21]
    assert request.output_token_ids


def test_chunks_are_cut_at_absolute_places() -> None:
    loop = Loop(max_num_batched_tokens=7, cache_mode="align").run_each([list(range(23))])
    chunks = [(row.length, row.num_tokens) for plan in loop.plans for row in plan.prefill]
    assert chunks == [*((start, 4) for start in range(0, 20, 4)), (20, 3)]


def test_lengths_clip_drafts() -> None:
    request = Loop(num_speculative_tokens=3, max_model_len=12).run(list(range(7)), max_tokens=30)
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.tokens) == 12
    loop = Loop(num_speculative_tokens=3, max_model_len=12)
    for length, tokens in ((7, 30), (6, 6)):
        loop.add(list(range(length)), max_tokens=tokens)
        while loop.step():
            loop.settle()  # before the next step is planned
    drafts = [row.num_drafts for plan in loop.plans for row in plan.decode]
    # Seven prompt tokens, one sampled, then four at once: nothing is left for a draft.
    assert (drafts[0], drafts[-2:]) == (3, [3, 0])


def test_no_step_for_a_row_whose_last_token_is_under_way() -> None:
    loop = Loop().run_each([[1, 2, 3]], max_tokens=2)
    assert sum(len(plan.decode) for plan in loop.plans) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": list(range(64))}, "at most 63"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": [1], "request_id": "taken"}, "in use"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(options: dict, text: str) -> None:
    loop = Loop()
    loop.add([1], request_id="taken")
    with pytest.raises(RequestError, match=text) as refused:
        loop.add(**options)
    assert "\n" not in str(refused.value)
    assert not refused.value.retry
    assert len(loop.scheduler.queues.waiting) == 1


def test_a_request_that_outgrows_the_pages_is_refused() -> None:
    loop = Loop(num_pages=6)
    with pytest.raises(RequestError, match="5 pages of 2 tokens hold 11 at most"):
        loop.add([1] * 10, max_tokens=2)
    loop.run([1] * 10, max_tokens=1)
    loop.run([1] * 4, max_tokens=7)


def test_choices_do_not_fill_the_queue_for_other_requests() -> None:
    loop = Loop(max_waiting=3)
    loop.add([1], max_tokens=1, request_id="many")
    for _ in range(2):
        loop.add([1], max_tokens=1, fork_of="many")
    with pytest.raises(RequestError, match="try later") as refused:
        loop.add([1], max_tokens=1, fork_of="many")
    assert refused.value.retry
    for _ in range(2):
        loop.add([2], max_tokens=1)
    with pytest.raises(RequestError, match="try later"):
        loop.add([2], max_tokens=1)
    loop.finish()


def test_a_client_does_not_fill_the_queue_alone() -> None:
    loop = Loop(max_waiting=8)
    for client, places in (("a", 4), ("b", 2), ("c", 1), (None, 1)):  # requests without a client fill all of it
        for _ in range(places):
            loop.add([1], max_tokens=1, client=client)
        with pytest.raises(RequestError, match="try later") as refused:
            loop.add([1], max_tokens=1, client=client)
        assert refused.value.retry
    loop.finish()
    for _ in range(8):  # the choices of one call may fill it
        loop.add([1], max_tokens=1, client="a", batch_id="call")
    loop.finish()


def test_the_latest_makes_room_and_resumes_from_the_cache() -> None:
    loop = Loop(num_pages=14, max_num_seqs=2, max_model_len=26)
    first = loop.add(list(range(10)), max_tokens=12)
    second = loop.add(list(range(20, 30)), max_tokens=12)
    loop.finish()
    assert (first.queueing.num_preemptions, second.queueing.num_preemptions > 0) == (0, True)
    assert loop.scheduler.stats()["preemptions"] == second.queueing.num_preemptions


def test_a_resumed_request_stops_at_its_prompt_end() -> None:
    loop = Loop(cache_mode="align")
    request = loop.add(list(range(10)), max_tokens=9)
    while len(request.output_token_ids) < 5:
        loop.step()
    loop.scheduler.reset()
    loop.device.wipe()
    loop.results.clear()
    loop.plans.clear()
    loop.finish()
    ends = [row.end for row in loop.plans[0].prefill + loop.plans[1].prefill + loop.plans[2].prefill]
    assert 10 in ends
    assert 10 in loop.positions()


def test_a_row_in_lockstep_sits_out_while_others_go_on() -> None:
    for drafts in (0, 2):
        loop = Loop(num_speculative_tokens=drafts)
        plain = loop.add([1, 2, 3], max_tokens=12 * (1 + drafts))
        held = loop.add([4, 5, 6], max_tokens=6 * (1 + drafts), lockstep=True)
        for _ in range(10):
            assert not loop.scheduler.needs_settle_before_schedule()
            loop.step()
        rows = [{row.request: row.num_drafts for row in plan.rows} for plan in loop.plans]
        assert [held in requests for requests in rows] == [True, False] * 5
        assert [requests[plain] for requests in rows] == [0] + [drafts] * 9
        assert [requests[held] for requests in rows[::2]] == [0] + [drafts] * 4
        loop.finish()


def test_counters_add_up() -> None:
    loop = Loop(num_speculative_tokens=2, rightness=0.5)
    requests = [loop.add(list(range(i, i + 9)), max_tokens=7) for i in range(3)]
    loop.finish()
    stats = loop.scheduler.stats()
    assert stats["output_tokens"] == sum(len(request.output_token_ids) for request in requests)
    assert stats["finished"] == {"length": 3}
    assert stats["prompt_tokens"] == 27
    assert stats["misses"] == {MissReason.NOT_FOUND.name.lower(): 3}
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def stepped(loop: Loop) -> tuple[StepPlan, list[tuple[str, int]]]:
    """Plans a step. Returns it, and its prompts with their tokens."""
    plan = loop.step()
    assert plan is not None
    return plan, [(row.request.request_id, row.num_tokens) for row in plan.prefill]


def test_short_prompts_overtake_long_ones_with_half_of_each_step() -> None:
    loop = Loop(max_num_seqs=4, max_num_batched_tokens=8, cache_mode="none", max_model_len=64)
    for i in range(3):
        loop.add([i] * 40, max_tokens=1, request_id=f"long{i}")
    loop.step()
    short = [loop.add([9] * 2, max_tokens=1, request_id=f"short{i}") for i in range(20)]
    longest = loop.scheduler.queues.running[0]
    steps = 0
    while not longest.finished:
        steps += 1
        assert sum(count for name, count in stepped(loop)[1] if name.startswith("short")) <= 4
        assert steps < 14, "short prompts starve the long one"
    assert sum(request.finished for request in short) >= 8, "short prompts wait for the long one"
    loop.finish()


def test_long_prompts_hold_half_of_the_row_ids() -> None:
    loop = Loop(max_num_seqs=4, max_num_batched_tokens=8, cache_mode="none", max_model_len=64)
    long = [loop.add([i] * 40, max_tokens=1) for i in range(6)]
    loop.steps(2)
    assert sum(request.status is Status.RUNNING for request in long) <= 2
    short = loop.add([9], max_tokens=1)
    loop.steps(2)
    assert short.finished
    loop.finish()
    assert all(request.finished for request in long)


def test_long_prompts_are_not_overtaken_for_ever() -> None:
    loop = Loop(max_num_seqs=2, max_num_batched_tokens=8, cache_mode="none", max_model_len=64)
    long = [loop.add([i] * 40, max_tokens=1) for i in range(3)]
    for step in range(120):
        loop.add([step % 7] * 2, max_tokens=1)
        loop.step()
    assert all(request.finished for request in long)
    loop.finish()


def test_a_step_that_decodes_keeps_to_its_pause() -> None:
    loop = Loop(max_num_batched_tokens=32, cache_mode="none", max_decode_pause=1.0, max_model_len=64)
    talker = loop.add([1], max_tokens=60)
    loop.steps(2)
    loop.scheduler.observe(loop.plans[0], 0.1)  # one token took so long
    loop.add([2] * 40, max_tokens=1)
    plan, prompts = stepped(loop)
    assert prompts == [("r2", 10)]
    for _ in range(20):
        loop.scheduler.observe(plan, 100.0)
    plan, prompts = stepped(loop)
    assert prompts == [("r2", 2)], "a tile at least"
    loop.scheduler.finish(talker.request_id, FinishReason.ABORT)
    plan, prompts = stepped(loop)
    assert prompts == [("r2", 2)], "a short prompt that comes meanwhile must not wait long"
    for _ in range(60):
        loop.scheduler.observe(plan, 0.4)
    plan, prompts = stepped(loop)
    assert prompts == [("r2", 24)], "five times as long as with decoding rows"
    loop.finish()


# -- several answers to one prompt --


def test_siblings_wait_for_the_first_ones_prompt_end() -> None:
    loop = Loop()
    loop.add(list(range(50, 61)), max_tokens=4, request_id="a")
    others = [loop.add(list(range(50, 61)), max_tokens=4, fork_of="a") for _ in range(2)]
    loop.finish()
    assert [request.lookup.num_cached_tokens for request in others] == [len(list(range(50, 61)))] * 2
    assert loop.scheduler.stats()["prefill_tokens"] == len(list(range(50, 61)))


def test_a_waiting_sibling_does_not_hold_up_others() -> None:
    loop = Loop(max_num_batched_tokens=6)
    loop.add(list(range(50, 61)), max_tokens=4, request_id="a")
    loop.add(list(range(50, 61)), max_tokens=4, fork_of="a")
    other = loop.add([1, 2], max_tokens=1)
    loop.steps(3)
    assert other.progress.row_id or other.finished
    loop.finish()


# -- settings --


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state_block_size": 5}, "state_block_size 5 is not a multiple of tile_size"),
        ({"page_size": 3}, "page_size 3 does not divide state_block_size"),
        ({"num_speculative_tokens": 4}, "is less than 1 . num_speculative_tokens = 5"),
        ({"num_slots": 1}, "num_slots is 1"),
        ({"num_slots": 3, "num_speculative_tokens": 2}, "one sequence needs 3"),
        ({"num_pages": 1}, "null page alone"),
        ({"num_pages": -1}, "must be at least 0"),
        ({"cache_mode": "some"}, "none, align or all"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_tiles": 0}, "max_tiles is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        small_config(**changes)
    assert "\n" not in str(refused.value)


def test_derived_sizes() -> None:
    config = small_config(num_slots=10, num_speculative_tokens=3, max_num_seqs=8)
    assert config.num_rows == 2
    # Wide enough for two unsettled steps beyond the longest sequence.
    assert config.pages_per_row == (64 + 2 * 4) // 2
    assert config.tiles == 32 + config.max_prefill_rows
    # Without attention, the page size need not divide B.
    assert small_config(page_size=3, num_pages=0).pages_per_row == 0
