"""Every planted fault of steps with drafts shows in one short piece of traffic. The table is docs/mutations.md."""

import functools
from collections import Counter

import numpy as np
import pytest

from serving.engine.requests.sampling_params import SamplingParams
from tests.serving.core.mutations.registry import Fault
from tests.serving.differential import draft_faults  # noqa: F401 - fills the tables
from tests.serving.differential.drafting import Drafting, Watch, drafters
from tests.serving.differential.faults import DRAFTS, REPLAY
from tests.serving.differential.judging import Divergence, compare
from tests.support.engines.engines import Continuation, finish
from tests.support.engines.shared_engines import MAX_LEN, SMALLEST, TILE, engines_of
from tests.support.engines.step_programs import PatchedPrograms
from tests.support.models.tiny_configs import ENGINE_VOCAB

_RNG = np.random.default_rng(12)
FIRST, TAIL = (_RNG.integers(0, ENGINE_VOCAB, count).tolist() for count in (41, 30))
PLAIN = {"temperature": 0.0, "logprobs": 2}
RANDOM = {"temperature": 0.9, "seed": 5, "logprobs": 2}
PENALIZED = PLAIN | {"presence_penalty": 2.0, "repetition_penalty": 1.5}
REWARDED = PLAIN | {"frequency_penalty": -1.0}
# Waves of (prompt, sampling, source, drafts a step): each is asked while the answers to the one before still come.
WAVES = (
    [(FIRST[:21], PLAIN, "right", None), (FIRST[:12], RANDOM, "right", 2), (TAIL[:5], PENALIZED, "right", 2)],
    [(FIRST[:21], PLAIN, "mtp", 2), (FIRST[:18], PLAIN, "wrong", None), (TAIL[:5], REWARDED, "mixed", 2)],
    [(FIRST[:16] + TAIL[:2], PLAIN, "mixed", 2), (FIRST[:12], RANDOM, "mixed", None), (TAIL[:25], PLAIN, "mtp", None)],
    [(FIRST, PLAIN, "gaps", 2), (FIRST[:40], PLAIN, "mtp", 1), (TAIL[:26], PLAIN, "ngram", 2)],
    [(FIRST[:21] + TAIL[:9], PLAIN, "mtp", 2), (TAIL[:5], PENALIZED, "wrong", 2), (FIRST, PLAIN, "right", 2)],
)  # fmt: skip
ASKS = {f"{wave}.{i}": ask for wave, asks in enumerate(WAVES) for i, ask in enumerate(asks)}
DRAFTING = {name: Drafting(ask[2], ask[3], seed) for seed, (name, ask) in enumerate(ASKS.items())}
OUTPUT = 18


@functools.cache
def expected() -> dict[str, Continuation]:
    """What sound programs say to each request without drafts, one after the other."""
    engine = engines_of(SMALLEST).engine("none", state_block_size=32, max_num_batched_tokens=MAX_LEN)
    lines = {}
    for name, (prompt, sampling, *_) in ASKS.items():
        output = engine.add_request(name, {"prompt_token_ids": prompt}, _params(sampling))
        finish(engine)
        lines[name] = Continuation.of(output.outputs[0])
    return lines


def _params(sampling: dict) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **sampling)


def run(compiles: str | None = None, *, layer: bool, replay: bool = False) -> None:
    """All waves; every output must be what it is without drafts, and the draft layer's drafts what they should be.

    `layer`: with the draft layer, which most faults do not need: a step without it compiles faster. `replay`: rows are
    held by anchors.
    """
    scripts = {name: DRAFTING[name].script(ASKS[name][0], line) for name, line in expected().items()}
    flags = {"state_block_size": TILE, "max_num_batched_tokens": 28, "adaptive_drafts": False}
    flags["replay_interval"] = TILE if replay else 1
    on = drafters(SMALLEST, most=2, layer=layer)
    programs = PatchedPrograms(on.programs_of(), on.compile_anew() if compiles else None, compiles)
    engine = on.engine("all", DRAFTING, scripts, programs=programs, **flags)
    watch = Watch(on, DRAFTING)
    outputs, lost = {}, []
    pages = engine.loop.scheduler.cache.pools[1]
    for wave, asks in enumerate(WAVES):
        for i, (prompt, sampling, *_) in enumerate(asks):
            name = f"{wave}.{i}"
            last = sampling is REWARDED
            outputs[name] = engine.add_request(name, {"prompt_token_ids": prompt}, _params(sampling), priority=last)
        steps = 8 if wave < len(WAVES) - 1 else 300
        while steps and engine.loop.busy:
            # For a while there are no pages: the last has to make room when it has said something.
            if wave == 1 and steps == 2:
                lost = list(iter(pages.take, 0))
            engine.step()
            watch.look(engine.loop)
            steps -= 1
        while lost and wave > 1:
            pages.release(lost.pop())
    assert not engine.loop.busy
    for name, output in outputs.items():
        choice = output.outputs[0]
        if len(choice.token_ids) != OUTPUT:
            raise Divergence(f"{name}: {len(choice.token_ids)} tokens")
        compare(Counter(), choice, expected()[name], name, tie=0.0)
    if wrong := watch.wrong():
        raise Divergence(wrong[0])
    assert any(outputs[name].metrics.num_preemptions for name, ask in ASKS.items() if ask[1] is REWARDED)
    assert (watch.count > 20) == layer
    stats = engine.loop.scheduler.stats()
    assert stats["full_hits"]
    assert 20 < stats["accepted_tokens"] < stats["drafted_tokens"] - 20


@pytest.mark.smoke("replay")
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("layer", [True, False])
def test_sound_programs_pass(layer: bool, replay: bool) -> None:
    run(layer=layer, replay=replay)


FULL = (17, 27, 38, 52)
"""One fault of each kind; each takes seconds to compile. The nightly run plants all."""
OF_LAYER = (26, 27, 28, 29, 52)
"""Faults that only a draft layer shows."""


def cases():
    """Each fault, and what shows it."""
    for table in (DRAFTS, REPLAY):
        for number, fault in table.items():
            how = {"layer": number in OF_LAYER, "replay": table is REPLAY}
            mark = pytest.mark.full if number in FULL else pytest.mark.slow
            yield pytest.param(fault, how, marks=mark, id=str(fault))


@pytest.mark.parametrize(("fault", "how"), cases())
def test_fault_shows(fault: Fault, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    run(**how)  # the sound programs are compiled before anything is planted
    fault.plant(monkeypatch)
    with pytest.raises(Divergence):
        run(fault.compiles, **how)
