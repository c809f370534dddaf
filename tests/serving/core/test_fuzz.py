"""Random schedules on the symbolic device: `--examples N` in all, each named by its seed.

Every read of a slot or page is checked against plain greedy decoding of the same prompt, every write against what is
published or shared, the index and the pools after each step, and the accounts at the end.
"""

import random
from collections import Counter
from itertools import count as numbers
from itertools import islice

import pytest

from serving.core.planning import admission
from tests.serving.core.schedules import random_config, run_seed

SHARDS = 4
DEFAULT_EXAMPLES = 20_000

REACHED = """
abort running, abort waiting, accepted_tokens, anchors, blocked, boundaries_not_kept, cached_tokens, displacements,
drafts under masks, drafts_cut, full_hits, page_copies, pages_evicted, preemptions, refused, resets, rows_stalled,
sitting out with drafts, states_evicted, weight_changes, withdrawn,
miss caching_off, miss evicted, miss not_found, miss not_yet_written, miss prompt_logprobs, miss salt_differs,
miss state_evicted, miss too_short, miss weights_changed
"""


def examples(request: pytest.FixtureRequest) -> int:
    """How many schedules in all."""
    return int(request.config.getoption("--examples", default=DEFAULT_EXAMPLES))


@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules(shard: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DISPLACE_AFTER", 2)  # schedules are short
    count = -(-examples(request) // SHARDS)
    first = shard * 1_000_000_000
    print(f"seeds {first} to {first + count - 1}")
    met: Counter[str] = Counter()
    for seed in range(first, first + count):
        met += run_seed(seed)
    print(dict(sorted(met.items())))
    if count >= 2_000:
        missing = [name for name in REACHED.replace("\n", " ").split(", ") if not met[name.strip()]]
        assert not missing, f"never met: {missing}"


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_by_replay(shard: int, request: pytest.FixtureRequest) -> None:
    """Only those whose rows are held by anchors, which are a third of all: `--examples N` of them."""
    first = (10 + shard) * 1_000_000_000
    by_replay = (seed for seed in numbers(first) if random_config(random.Random(seed)).replay_interval > 1)
    met: Counter[str] = Counter()
    for seed in islice(by_replay, -(-examples(request) // SHARDS)):
        met += run_seed(seed)
    print(f"seeds {first} to {seed}: {dict(sorted(met.items()))}")
    assert met["anchors"]
