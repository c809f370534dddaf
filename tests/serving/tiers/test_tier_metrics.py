"""Metrics of tiers: all that are exposed are on their page."""

import re
from pathlib import Path

from serving.api.metrics import Families, add_fetches, add_tiers
from serving.core.tiers.tier import Sizes, Tier
from serving.core.tiers.tiers import FetchCosts, Tiers

PAGE = Path(__file__).parents[3] / "docs" / "tiers.md"


def test_the_page_names_every_metric_of_tiers():
    sizes = Sizes(state=1, page=0, page_size=1, block=1)
    tiers = Tiers(Tier("host", 10, sizes), Tier("disk", 20, sizes), costs=FetchCosts(), max_copying=1)
    found = tiers.snapshot()
    families = Families()
    add_tiers(families, found)
    add_fetches(families, found)
    samples = [sample for metric in families.metrics() for sample in metric.samples]
    assert {sample.labels["tier"] for sample in samples} == {"host", "disk"}
    assert {sample.value for sample in samples if sample.name == "mamba_jax_tier_capacity_bytes"} == {10.0, 20.0}
    assert {sample.name for sample in samples} == set(re.findall(r"`(mamba_jax_tier_\w+)", PAGE.read_text()))
