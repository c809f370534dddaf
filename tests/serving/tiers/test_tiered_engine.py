"""Engines with tiers below a device that holds next to nothing: the same tokens as without."""

import pytest

from serving.core.tiers.prices import Prices
from tests.support.engines import finish
from tests.support.split_pair import GREEDY, MAX_LEN, assert_as_alone, build, tokens

# Two running sequences with their drafts, and little beside them: nearly every checkpoint is evicted.
SMALL = {"max_num_seqs": 2, "num_slots": 14, "num_pages": 26, "max_num_batched_tokens": 40}
GIB = 1 << 30
SIZE = 4_000_000 / GIB
TIERS = {
    "host": {"host_cache_gib": SIZE},
    "disk": {"disk_cache_gib": 40 * SIZE},
    "host disk": {"host_cache_gib": SIZE, "disk_cache_gib": 40 * SIZE},
    "small host": {"host_cache_gib": SIZE / 200},
    "small host, disk": {"host_cache_gib": SIZE / 200, "disk_cache_gib": SIZE},
}


class Free(Prices):
    """Computing a few tokens with a tiny model takes less time than any fetch."""

    def worth_fetching(self, tier: str, num_bytes: int, tokens: int) -> bool:
        return True


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("mode", "source", "tiers"), [
    ("all", "mtp", "host disk"),
    slow("all", "none", "host"), slow("all", "none", "small host"), slow("all", "none", "small host, disk"),
    slow("align", "mtp", "disk"),
    slow("align", "none", "host disk"), slow("align", "none", "disk"),
    slow("all", "ngram", "disk"), slow("all", "ngram", "host"), slow("align", "ngram", "host disk"),
    slow("all", "mtp", "small host, disk"), slow("align", "mtp", "host"),
])  # fmt: skip
def test_the_same_tokens_with_tiers(mode, source, tiers, tmp_path):
    """Conversations in turn, two requests at a time: each prompt goes on from the one before it."""
    folder = {"disk_cache": str(tmp_path)} if "disk" in tiers else {}
    engine = build(mode, source, **(SMALL | TIERS[tiers] | folder)).engine
    engine.loop.scheduler.tiers.prices = Free()
    outputs = {}
    for turn in range(1, 4):
        for pair in ((0, 1), (2, 3), (4,)):
            for talker in pair:
                prompt = tuple(tokens(talker, min(19 * turn + talker, MAX_LEN - 14)))
                outputs[prompt] = engine.add_request(f"{talker} {turn}", {"prompt_token_ids": list(prompt)}, GREEDY)
            finish(engine)
    for prompt, output in outputs.items():
        assert_as_alone(prompt, output, (mode, source, tiers))
    scheduler = engine.loop.scheduler
    scheduler.check(idle=True)
    stats = scheduler.stats()
    assert stats["states_evicted"] > 5
    if "small" not in tiers:
        assert sum(tier["arrived"] for tier in stats["tiers"].values()) > 3, stats
    assert sum(tier["lost"] for tier in stats["tiers"].values()) == 0, stats
    engine.close()
