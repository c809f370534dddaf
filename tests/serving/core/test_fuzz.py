"""Random schedules on the symbolic device: `--examples N` in all, each named by its seed.

Every read of a slot or page is checked against plain greedy decoding of the same prompt, every write against what is
published or shared, the index and the pools after each step, and the accounts at the end.
"""

import importlib
import statistics
import time

import pytest

from serving.core.config import SchedulerConfig
from serving.core.planning import admission
from serving.core.planning.plan import StepPlan, StepResult
from serving.core.requests.request import Request
from serving.core.scheduler import Scheduler
from tests.serving.core.mutations import CORE
from tests.serving.core.mutations.registry import Fault
from tests.serving.core.schedules import run_seed, run_seeds

SHARDS = 2

REACHED = """\
abort running, abort waiting, accepted_tokens, anchors, blocked, boundaries_not_kept, cached_tokens, displacements,
drafts under masks, drafts_cut, full_hits, page_copies, pages_evicted, preemptions, refused, resets, rows_stalled,
sitting out with drafts, states_evicted, weight_changes, withdrawn,
miss caching_off, miss evicted, miss not_found, miss not_yet_written, miss prompt_logprobs, miss salt_differs,
miss state_evicted, miss too_short, miss weights_changed""".replace("\n", " ").split(", ")


@pytest.mark.fuzz
@pytest.mark.smoke
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules(shard: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DISPLACE_AFTER", 2)  # schedules are short
    count = -(-request.config.option.examples // SHARDS)
    first = shard * 1_000_000_000
    run_seeds(run_seed, range(first, first + count), REACHED if count >= 2_000 else ())


DECODING = 32


@pytest.mark.parametrize("drafts", [0, 3])
def test_host_time_of_a_decode_step(drafts: int) -> None:
    """Median processor time of schedule, dispatched and settle, 32 rows decoding behind 1,000-token prompts."""
    config = SchedulerConfig(
        num_slots=600, num_pages=8000, max_num_seqs=DECODING, max_num_batched_tokens=8192, max_model_len=4096,
        num_speculative_tokens=drafts, num_lookahead_tokens=drafts,
    )  # fmt: skip
    scheduler = Scheduler(config)
    for i in range(DECODING):
        scheduler.add(Request(str(i), range(i, i + 1000), max_tokens=3000, eos_token_ids=[7]))
    before: tuple[StepPlan, StepResult] | None = None
    times: list[float] = []
    while len(times) < 200:
        start = time.process_time()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.dispatched(plan)
        spent = time.process_time() - start
        decoded = [[9] * (1 + row.num_drafts // 2) * row.sample for row in plan.decode]
        result = StepResult(decoded, [[9] * row.sample for row in plan.prefill])
        start = time.process_time()
        if before is not None:
            scheduler.settle(*before)
        spent += time.process_time() - start
        before = (plan, result)
        if len(plan.decode) == DECODING:
            times.append(spent)
    # 0.08 and 0.12 ms where it was written; the bound leaves room for slow machines, not for work per token.
    assert statistics.median(times) < 0.6e-3


BOUND = 6_000
LATE = (24, 80)
"""Faults that take thousands of schedules to show are planted with `--slow`."""
BY_FUZZER = [
    pytest.param(fault, marks=[pytest.mark.slow] if number in LATE else [])
    for number, fault in sorted(CORE.items())
    if fault.seen_by is None
]


@pytest.mark.full
@pytest.mark.parametrize("fault", BY_FUZZER, ids=str)
def test_fuzzer_sees(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    for seed in range(BOUND):
        try:
            run_seed(seed)
        except Exception as error:
            print(f"{fault.name}: {fault.text}: seed {seed}: {type(error).__name__}: {str(error)[:100]}")
            return
    raise AssertionError(f"{fault.name}: {fault.text}: not seen in {BOUND} schedules")


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in CORE.values() if fault.seen_by], ids=str)
def test_a_test_sees(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = fault.seen_by
    test = getattr(importlib.import_module(f"tests.serving.core.{module}"), name)
    test()
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()
