"""Random traffic with drafts says what greedy decoding without says: every source and count x everything else.

Which source a request has, and how many drafts, is its own: one step verifies drafts of all kinds. See `drafting`.
"""

from collections import Counter

import pytest

from tests.serving.differential.drafting import COUNTS, SOURCES, drafters
from tests.serving.differential.traces import DRAFTING_MODELS, run_trace

SHARDS = 2
DEFAULT_EXAMPLES = 20_000
SYMBOLIC_PER_TRACE = 250
"""A trace counts as so many symbolic schedules."""

WITH_DRAFTER = ("none", "align", "all", "preemptions", "full_hits", "cached_tokens", "layer", "drafted mtp")

REACHED = (
    "none", "align", "all", *DRAFTING_MODELS, "aborted", "withdrawn", "failures", "preemptions", "states_evicted",
    "pages_evicted", "page_copies", "full_hits", "cached_tokens", "prompt_logprobs", "layer", "drafts_cut",
    "accepted ngram", *(f"drafted {source}" for source in SOURCES), *(f"K {count}" for count in COUNTS),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(SHARDS))
def test_traces_with_drafts(shard: int, request: pytest.FixtureRequest) -> None:
    examples = int(request.config.getoption("--examples", default=DEFAULT_EXAMPLES))
    count = max(80, examples // SYMBOLIC_PER_TRACE) // SHARDS
    first = 50_000_000 + shard * 1_000_000
    print(f"seeds {first} to {first + count - 1}")
    met: Counter[str] = Counter()
    for seed in range(first, first + count):
        met += run_trace(seed, drafts=True)
    print(dict(sorted(met.items())))
    missing = [name for name in REACHED if not met[name]]
    assert not missing, f"never met: {missing}"
    assert met["cut"] <= 1 + met["comparisons"] // 200, "too many comparisons were cut short by near-ties"
    # Scripts that are right are always accepted, but for what a near-tie has turned; what is wrong never is.
    assert met["wasted right"] <= met["cut"] * 24
    assert met["accepted wrong"] == 0
    for name in set(DRAFTING_MODELS):
        # Seats with and without penalties, page tables, prefill, and decoding with and without drafts.
        assert drafters(name).programs.compilations <= 6, "a trace has compiled something"


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("model", ["selective", "windowed", "griffin"])
def test_traces_of_other_mixers(model: str) -> None:
    met: Counter[str] = Counter()
    for seed in range(54_000_000, 54_000_025):
        met += run_trace(seed, drafts=True, model=model)
    missing = [name for name in ("align", "all", "failures", "full_hits", "accepted ngram") if not met[name]]
    assert not missing, f"never met: {missing}"
    assert met["accepted wrong"] == 0


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [None, 8])
@pytest.mark.parametrize("model", ["eagle3", "dflash"])
def test_traces_with_a_drafter(model: str, replay: int | None) -> None:
    """A drafter with weights, keys and a vocabulary of its own takes the place of the draft layer."""
    met: Counter[str] = Counter()
    for seed in range(52_000_000, 52_000_024):
        met += run_trace(seed, drafts=True, model=model, replay=replay)
    print(dict(sorted(met.items())))
    missing = [name for name in WITH_DRAFTER if not met[name]]
    assert not missing, f"never met: {missing}"
    assert met["cut"] <= 1 + met["comparisons"] // 200, "too many comparisons were cut short by near-ties"
    assert met["accepted wrong"] == 0
