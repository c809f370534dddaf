"""Random traffic with states or pages in fewer bits says what plain decoding with the same bits says, within a bound.

A state is rounded where it is stored: after each token of a decode step, but in prefill only where a chunk ends. So
what was reused, and how a prompt was cut, shows in log-probabilities. `shared_engines.VARIANTS` says by how much at
most (measured over 24 traces: 0.005 with bfloat16, 0.001 with float16). Keys and values are rounded once, when they are
written, so with them in 8 bits answers depend on nothing but how float32 rounds.
"""

from collections import Counter

import pytest

from tests.serving.differential.traces import run_trace
from tests.support.shared_engines import VARIANTS

COUNT = 16


@pytest.mark.fuzz
@pytest.mark.parametrize("variant", VARIANTS)
def test_traces(variant: str, request: pytest.FixtureRequest) -> None:
    first = 5_000_000
    met: Counter[str] = Counter()
    for seed in range(first, first + COUNT):
        met += run_trace(seed, model=variant)
    print(dict(sorted(met.items())))
    for name in ("align", "all", "preemptions", "page_copies", "full_hits", "cached_tokens"):
        assert met[name], f"never met: {name}"
    assert met["cut"] <= met["comparisons"] // 4, "too many comparisons were cut short by near-ties"
