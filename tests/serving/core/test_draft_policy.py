"""How many drafts a step has: what the policy learns, and that it does not give up for ever."""

import pytest

from serving.core import AdaptiveDrafts, DraftPolicy, Request, Scheduler, SchedulerConfig, StepResult
from serving.core.requests.drafts import OPTIMISM


def requests(count: int) -> list[Request]:
    return [Request(str(i), [1, 2, 3]) for i in range(count)]


def teach(policy: AdaptiveDrafts, request: Request, accepted: int, times: int = 60) -> None:
    for _ in range(times):
        policy.observe(request, policy.most, accepted)


def counts(policy: DraftPolicy, rows: list[Request]) -> list[int]:
    policy.begin(rows)
    return [policy.wanted(row) for row in rows]


def test_without_a_policy_there_are_always_as_many_as_fit() -> None:
    assert counts(DraftPolicy(3), requests(64)) == [3] * 64


def test_nothing_is_known_at_first() -> None:
    assert counts(AdaptiveDrafts(3, knee=5), requests(1)) == [3]
    assert counts(AdaptiveDrafts(3, knee=100), requests(32)) == [3] * 32


def test_none_where_a_full_batch_makes_them_expensive() -> None:
    """32 rows of which each gets 2 of 3 drafts accepted: worth it where a step has room for them, and only there."""
    for knee, worth in ((5, False), (20, False), (50, True), (200, True)):
        policy, rows = AdaptiveDrafts(3, knee=knee), requests(32)
        for row in rows:
            for accepted in (3, 2, 2, 1) * 10:
                policy.observe(row, 3, accepted)
        assert any(counts(policy, rows)) == worth, knee
    # The same rows, few at a time.
    assert all(counts(AdaptiveDrafts(3, knee=5), requests(4)))


def test_each_row_has_the_number_that_pays() -> None:
    policy, (good, fair, bad) = AdaptiveDrafts(5, knee=100), requests(3)
    teach(policy, good, 5)
    for accepted in (1, 2, 1, 2) * 20:
        policy.observe(fair, 5, accepted)
    teach(policy, bad, 0)
    high, middle, low = counts(policy, [good, fair, bad])
    assert (high, low) == (5, 1)
    assert 1 < middle < 5


def test_drafts_that_never_come_are_not_waited_for() -> None:
    policy, rows = AdaptiveDrafts(3, knee=5), requests(1)
    for _ in range(60):
        policy.observe(rows[0], 0, 0)
    assert counts(policy, rows) == [0]


def test_what_failed_is_tried_again_now_and_then() -> None:
    policy, rows = AdaptiveDrafts(3, knee=5), requests(1)
    teach(policy, rows[0], 0)
    tried = 0
    for _ in range(400):
        if counts(policy, rows) != [0]:
            tried += 1
            policy.observe(rows[0], 3, 0)
    assert 2 <= tried <= 20
    # Once they are right again, they stay.
    while counts(policy, rows) == [0]:
        pass
    teach(policy, rows[0], 3, times=20)
    assert counts(policy, rows) == [3]


def test_new_rows_begin_with_what_is_common() -> None:
    policy, (old, new) = AdaptiveDrafts(3, knee=5), requests(2)
    teach(policy, old, 0, times=200)
    assert counts(policy, [new]) == [0]
    assert new.draft_acceptance is not None
    assert new.draft_acceptance < OPTIMISM / 2


@pytest.mark.parametrize(("right", "most"), [(True, 3), (False, 0)])
def test_the_scheduler_asks_and_tells(right: bool, most: int) -> None:
    config = SchedulerConfig(num_slots=20, num_pages=60, num_speculative_tokens=3, max_num_seqs=2, max_model_len=600)
    scheduler = Scheduler(config, drafts=AdaptiveDrafts(3, knee=5))
    scheduler.add(Request("a", [1, 2, 3], max_tokens=400))
    planned = []
    for _ in range(60):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.dispatched(plan)
        planned += [row.num_drafts for row in plan.decode]
        emitted = [[9] * (1 + right * row.num_drafts) for row in plan.decode]
        scheduler.settle(plan, StepResult(emitted, [[9]] * len(plan.prefill), [row.num_drafts for row in plan.decode]))
    assert planned[0] == 3
    assert planned[20:].count(most) > 35
