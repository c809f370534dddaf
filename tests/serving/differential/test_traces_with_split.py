"""The same traffic as without a split, of which most prompts are computed by another engine, says the same.

Cache modes and block sizes of either side, both handoffs, drafts, preemption, aborts, lost stores on both sides, states
that come late, in another order or not at all: see `traces.draw` and `splitting.draw_split`.
"""

from collections import Counter

import pytest

from tests.serving.differential.splitting import impatient
from tests.serving.differential.traces import run_trace

DEFAULT_EXAMPLES = 20_000
SYMBOLIC_PER_TRACE = {False: 400, True: 1000}
"""A trace counts as so many symbolic schedules; those with drafts are longer."""

REACHED = (
    "none", "align", "all", "nemotronh", "falconh1", "full", "recompute-last", "arrived", "failed", "late", "spared",
    "pages_spared", "aborted", "withdrawn", "failures", "preemptions", "stores lost there", "taken back",
)  # fmt: skip


def run(first: int, count: int, drafts: bool) -> Counter[str]:
    print(f"seeds {first} to {first + count - 1}")
    met: Counter[str] = Counter()
    with impatient():
        for seed in range(first, first + count):
            met += run_trace(seed, drafts=drafts, split=True)
    print(dict(sorted(met.items())))
    missing = [name for name in REACHED if not met[name]]
    assert not missing, f"never met: {missing}"
    assert met["cut"] <= 1 + met["comparisons"] // 200, "too many comparisons were cut short by near-ties"
    return met


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("drafts", [False, True], ids=["without drafts", "with drafts"])
def test_with_a_split(drafts: bool, request: pytest.FixtureRequest) -> None:
    examples = int(request.config.getoption("--examples", default=DEFAULT_EXAMPLES))
    # The seeds of the traces without a split: each of them is run both ways.
    met = run(50_000_000 if drafts else 0, max(20, examples // SYMBOLIC_PER_TRACE[drafts]), drafts)
    if drafts:
        assert met["layer"]
        assert met["accepted wrong"] == 0


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("drafts", [False, True], ids=["without drafts", "with drafts"])
def test_more_with_a_split(drafts: bool) -> None:
    run(50_000_300 if drafts else 300, 200 if drafts else 400, drafts)
