"""Random traffic whose decode and prefill rows run in one program says what greedy decoding says.

The reference outputs come from requests that run alone, so that none of their steps is mixed.
"""

import pytest

from tests.serving.differential.test_traces_with_replay import FEW, MODELS, run
from tests.support.selection import slow

REACHED = tuple(name for name in FEW if name != "anchors")


@pytest.mark.full
@pytest.mark.fuzz
def test_traces() -> None:
    assert run(60_000_000, 40, model="nemotronh", mixed=True, reached=REACHED)["mixed"] > 40


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("replay", [None, slow(8)])
def test_traces_of_each_recurrence(model: str, replay: int | None) -> None:
    assert run(61_000_000, 10, model=model, replay=replay, mixed=True, reached=())["mixed"] > 5


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [slow(None), 8])
def test_traces_with_drafts(replay: int | None) -> None:
    met = run(62_000_000, 30, drafts=True, model="nemotronh", replay=replay, mixed=True, reached=("all", "full_hits"))
    assert met["mixed"] > 30
    assert met["layer"]
