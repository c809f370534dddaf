"""The same traffic, its rows held by an anchor and the inputs since, says what greedy decoding says.

Intervals, drafts, cache modes, preemption, slots that run short, aborts, failing steps, and a prefill side that holds
its own rows otherwise. See `traces.draw`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.serving.differential.splitting import impatient
from tests.serving.differential.traces import run_trace

REACHED = (
    "none", "align", "all", "aborted", "withdrawn", "failures", "preemptions", "states_evicted", "pages_evicted",
    "page_copies", "full_hits", "cached_tokens", "anchors",
)  # fmt: skip
MODELS = ("nemotronh", "mamba2", "falconh1", "delta", "short_conv", "kimi", "lightning", "selective")


FEW = ("align", "all", "aborted", "failures", "full_hits", "page_copies", "cached_tokens", "anchors")
"""What a handful of traces meets, too."""


def run(first: int, count: int, *, reached: Sequence[str] = REACHED, **how: Any) -> Counter[str]:
    print(f"seeds {first} to {first + count - 1}, {how}")
    met: Counter[str] = Counter()
    with impatient():
        for seed in range(first, first + count):
            met += run_trace(seed, **how)
    print(dict(sorted(met.items())))
    missing = [name for name in reached if not met[name]]
    assert not missing, f"never met: {missing}"
    assert met["cut"] <= 1 + met["comparisons"] // 200, "too many comparisons were cut short by near-ties"
    assert met["accepted wrong"] == 0
    return met


@pytest.mark.fuzz
def test_traces() -> None:
    run(0, 60, replay=8, model="nemotronh")


@pytest.mark.full
@pytest.mark.fuzz
def test_traces_with_drafts() -> None:
    met = run(50_000_000, 40, drafts=True, replay=8, model="nemotronh")
    assert met["drafts_cut"]
    assert met["layer"]


@pytest.mark.full
@pytest.mark.fuzz
def test_traces_of_the_delta_rule() -> None:
    """Whose tails hold what a token added to the state, found as it was absorbed."""
    met = run(51_000_000, 25, drafts=True, replay=8, model="delta")
    assert met["layer"]


@pytest.mark.full
@pytest.mark.fuzz
def test_traces_of_decays_by_channel() -> None:
    """With attention over latents."""
    run(52_000_000, 8, drafts=True, replay=8, model="kimi", reached=FEW)


@pytest.mark.full
@pytest.mark.fuzz
def test_traces_of_fixed_decays() -> None:
    """With residuals through norms."""
    run(53_000_000, 8, drafts=True, replay=8, model="lightning", reached=FEW)


@pytest.mark.full
@pytest.mark.fuzz
def test_traces_of_the_selective_scan() -> None:
    """Whose states have a decay for each channel and entry, which the replay computes again from step sizes."""
    run(54_000_000, 8, drafts=True, replay=8, model="selective", reached=FEW)


@pytest.mark.full
@pytest.mark.fuzz
def test_traces_with_split() -> None:
    """The prefill side has rows of either form."""
    met = run(0, 40, split=True, replay=8, model="nemotronh")
    assert met["full"]
    assert met["recompute-last"]
    assert met["arrived"]


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("model", MODELS)
def test_more_traces(model: str, replay: int) -> None:
    run(1_000, 150, replay=replay, model=model)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("model", ["nemotronh", "falconh1", "delta", "kimi", "lightning", "selective"])
def test_more_traces_with_drafts(model: str, replay: int) -> None:
    """Up to R / 2 - 1 drafts, and never more than 5; requests have 0, 1, 3 and 5 of them and other numbers."""
    run(50_001_000, 100, drafts=True, replay=replay, model=model)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [8, 32])
@pytest.mark.parametrize("model", ["nemotronh", "delta", "kimi", "lightning", "selective"])
def test_more_traces_with_drafts_and_split(model: str, replay: int) -> None:
    run(50_002_000, 100, drafts=True, split=True, replay=replay, model=model)
