"""Random traffic through real tiny models says what greedy decoding says: `--examples N` / 33 traces.

At least 700, which are 100 for each recurrence, where N is 20,000 or more.

Cache mode, chunking, batch mix, shared prefixes, repeats, preemption, aborts, seeds, several choices, failing and
withdrawn steps: a trace mixes them all. See `traces.draw` for what a seed decides.
"""

from collections import Counter

import numpy as np
import pytest

from tests.serving.differential.judging import TOLERANCE
from tests.serving.differential.traces import run_trace
from tests.support.shared_engines import PROGRAMS, SAMPLINGS, engines_of

SHARDS = 4
DEFAULT_EXAMPLES = 20_000
SYMBOLIC_PER_TRACE = 33
"""A trace counts as so many symbolic schedules."""

REACHED = (
    "none", "align", "all", "nemotronh", "mamba2", "falconh1", "delta", "short_conv", "kimi", "lightning", "selective",
    "debug", "aborted", "withdrawn", "failures", "preemptions", "states_evicted", "pages_evicted", "page_copies",
    "full_hits", "cached_tokens", "prompt_logprobs", *SAMPLINGS, "stop text",
)  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(SHARDS))
def test_traces(shard: int, request: pytest.FixtureRequest) -> None:
    examples = int(request.config.getoption("--examples", default=DEFAULT_EXAMPLES))
    total = max(700 if examples >= DEFAULT_EXAMPLES else 0, examples // SYMBOLIC_PER_TRACE)
    count = total // SHARDS
    first = shard * 1_000_000
    print(f"seeds {first} to {first + count - 1}")
    met: Counter[str] = Counter()
    for seed in range(first, first + count):
        met += run_trace(seed)
    print(dict(sorted(met.items())))
    missing = [name for name in REACHED if not met[name]] if total >= 700 else []
    assert not missing, f"never met: {missing}"
    assert met["cut"] <= 1 + met["comparisons"] // 200, "too many comparisons were cut short by near-ties"
    for name in PROGRAMS:
        assert engines_of(name).programs.compilations <= PROGRAMS[name], "a trace has compiled something"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_reference_is_what_the_model_says(name: str) -> None:
    """One at a time through the engine is the same as the whole sequence at once, without any store."""
    on = engines_of(name)
    for prompt in [(5,), tuple(range(3, 20)), tuple(range(50, 90))]:
        (line,) = on.alone(prompt)
        said = on.whole([*prompt, *line.tokens])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(said, np.array(line.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(line.logprobs, chosen, atol=TOLERANCE)
        assert (said.max(axis=1) - chosen < TOLERANCE).all()
    # An early token still matters late: were the state forgotten quickly, these tests would see little.
    changed = np.abs(on.whole([7, *range(60)])[-1] - on.whole([8, *range(60)])[-1]).max()
    assert changed > 10 * TOLERANCE
