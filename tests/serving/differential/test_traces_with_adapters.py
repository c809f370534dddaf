"""Random traffic whose requests have one of several adapters, or none: each says what it says alone.

LoRA, initial states or both; names that get new content while requests run; more contents than entries. The rest of a
trace is as without adapters: cache modes, chunks, drafts, replay, mixed steps, preemption, aborts, failing steps.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from mamba_jax.adapters import adaptable_layers
from serving.engine.requests.adapters import LoRARequest
from tests.serving.differential import traces
from tests.serving.differential.adapter_faults import ADAPTERS
from tests.serving.differential.faults import Fault
from tests.serving.differential.judging import TOLERANCE, Divergence
from tests.serving.differential.traces import run_traces as run
from tests.support.engines.shared_engines import SMALLEST, SharedEngines, engines_of
from tests.support.models.adapter_contents import CONTENTS, content
from tests.support.selection import slow

SPLIT = ("lora", "state", "both", "no adapter", "full", "recompute-last", "arrived", "spared")
FEW = ("lora", "state", "both", "no adapter", "cached_tokens", "full_hits", "adapters waited")
REACHED = (*FEW, "none", "align", "all", "aborted", "failures", "preemptions", "states_evicted", "pages_evicted")


MODELS = ("nemotronh", slow("falconh1"), "delta", slow("short_conv"), slow("kimi"))


def test_a_few_traces() -> None:
    run(70_000_000, 6, adapters=True, model=SMALLEST, reached=FEW)


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("model", MODELS)
def test_traces(model: str) -> None:
    run(71_000_000, 60, adapters=True, model=model, reached=REACHED)


@pytest.mark.full
@pytest.mark.fuzz
def test_a_few_traces_with_a_split() -> None:
    """Another engine with the same adapters computes most prompts."""
    run(76_000_000, 6, adapters=True, split=True, model=SMALLEST, reached=SPLIT)


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("model", ["nemotronh", slow("delta")])
def test_traces_with_a_split(model: str) -> None:
    run(77_000_000, 30, adapters=True, split=True, model=model, reached=(*SPLIT, "failed", "aborted"))


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [slow(None), 8])
def test_traces_with_drafts(replay: int | None) -> None:
    # Not from 72_000_000: with seed 72_000_018, a drawn number is within 3e-8 of the bound between two tokens.
    met = run(75_000_000, 40, adapters=True, drafts=True, replay=replay, model="nemotronh", reached=FEW)
    assert met["drafts_cut"]


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("model", "mixed"), [slow("nemotronh", False), slow("nemotronh", True), ("delta", False), slow("delta", True)]
)
def test_traces_with_replay(model: str, mixed: bool) -> None:
    met = run(73_000_000, 40, adapters=True, replay=8, mixed=mixed, model=model, reached=FEW)
    assert met["anchors"]
    assert bool(met["mixed"]) == mixed


@pytest.mark.full
def test_the_references_are_those_of_the_merged_weights() -> None:
    """One at a time through the engine is the same as a model with the adapter in its weights, without any store."""
    on, prompt = engines_of(f"{SMALLEST}, adapters"), tuple(range(3, 20))
    lines = [on.alone(prompt, adapter=LoRARequest("x", 0, str(number)))[0] for number in range(len(CONTENTS))]
    assert len({tuple(line.tokens) for line in (*lines, *on.alone(prompt))}) == 1 + len(CONTENTS)
    for number, line in enumerate(lines):
        if CONTENTS[number] != "lora":
            continue
        said = _merged(on, number, [*prompt, *line.tokens])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(said, np.array(line.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(line.logprobs, chosen, atol=TOLERANCE)


def _merged(on: SharedEngines, number: int, tokens: list[int]) -> np.ndarray:
    model = nnx.clone(on.model)
    for path, layer in adaptable_layers(model).items():
        a, b = content(on.model, number).layers[path]
        layer.weight[...] = layer.weight[...] + (b @ a).reshape(layer.weight.shape)
    return np.asarray(jax.nn.log_softmax(model(np.array([tokens]), np.array([len(tokens)]))))[0]


@pytest.mark.full
@pytest.mark.parametrize("fault", ADAPTERS.values(), ids=lambda fault: f"D{fault.number}-{fault.plant.__name__}")
def test_fault_shows(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(70_000_000, 70_000_012):
        traces.draw(seed, adapters=True, model=SMALLEST)  # the references are computed before anything is planted
    fault.plant(monkeypatch)
    if fault.compiles:
        on = engines_of(f"{SMALLEST}, adapters")
        monkeypatch.setattr(on, "_programs", {tile: on.compile_anew() for tile in on._programs})
    with pytest.raises(Divergence):
        run(70_000_000, 12, adapters=True, model=SMALLEST)
