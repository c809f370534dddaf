"""Random traffic with states or pages in fewer bits says what plain decoding with the same bits says, within a bound.

A state is rounded where it is stored: after each token of a decode step, but in prefill only where a chunk ends. So
what was reused, and how a prompt was cut, shows in log-probabilities. `shared_engines.VARIANTS` says by how much at
most (measured over 24 traces: 0.005 with bfloat16, 0.001 with float16). Keys and values are rounded once, when they are
written, so with them in 8 bits answers depend on nothing but how float32 rounds.
"""

import dataclasses
from typing import Any
from unittest import mock

import pytest

from serving.core import SchedulerConfig
from serving.engine.assembly import design
from serving.engine.assembly.design import scheduler_config
from tests.serving.differential.judging import Divergence
from tests.serving.differential.traces import draw, run_trace, run_traces
from tests.support.engines.shared_engines import EXACT, VARIANTS

pytestmark = pytest.mark.full

COUNT = 16


@pytest.mark.fuzz
@pytest.mark.parametrize("variant", VARIANTS)
def test_traces(variant: str) -> None:
    reached = ("align", "all", "preemptions", "page_copies", "full_hits", "cached_tokens")
    run_traces(5_000_000, COUNT, model=variant, reached=reached, ties=1 / 4)


HOW: dict[str, dict[str, Any]] = {
    "snapshots": {},
    "drafts": {"drafts": True},
    "replay, drafts": {"drafts": True, "replay": 8},
    "split": {"split": True},
}
USUAL = ("snapshots", "replay, drafts")


CASES = [
    pytest.param(variant, how, marks=() if variant.startswith("int8") and how in USUAL else pytest.mark.slow)
    for variant in EXACT
    for how in HOW
]


@pytest.mark.fuzz
@pytest.mark.parametrize(("variant", "how"), CASES)
def test_rounded_rows(variant: str, how: str) -> None:
    """Rows are rounded at multiples of B, whatever else: cold runs, hits, drafts, replay, a split all say the same."""
    run_traces(5_100_000, COUNT, model=variant, reached=("align", "all", "cached_tokens"), ties=1 / 50, **HOW[how])


def test_chunks_that_run_over_a_boundary_are_noticed() -> None:
    """Planted: states that are not rounded where the references' are. The bound is narrow enough to see it."""

    def unbound(*arguments: Any, **more: Any) -> SchedulerConfig:
        return dataclasses.replace(scheduler_config(*arguments, **more), chunks_end_at_blocks=False)

    def run_all() -> None:
        for seed in range(5_100_000, 5_100_000 + COUNT):
            draw(seed, model="int8, exact")  # right references
            with mock.patch.object(design, "scheduler_config", unbound):
                run_trace(seed, model="int8, exact")

    with pytest.raises(Divergence):
        run_all()
