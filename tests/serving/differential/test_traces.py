"""Random traffic through real tiny models says what greedy decoding says.

Cache mode, chunking, batch mix, shared prefixes, repeats, preemption, aborts, seeds, several choices, failing and
withdrawn steps: a trace mixes them all. Drafts of any source and count, rows that are held by an anchor and the inputs
since, a prefill side, steps that mix decode and prefill rows, adapters, states and pages in fewer bits, and engines
whose bits do not depend on the schedule come in addition. See `traces.draw` for what a seed decides.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from kernels_pallas.native import WHY_MISSING
from mamba_jax.adapters import adaptable_layers
from serving.engine.requests.adapters import LoRARequest
from tests.serving.differential.drafting import COUNTS, SOURCES, drafters
from tests.serving.differential.traces import DRAFTING_MODELS, MODELS, run_traces
from tests.support.engines.shared_engines import (
    EXACT,
    INVARIANT,
    INVARIANT_MODELS,
    MEMBERS,
    PROGRAMS,
    SAMPLINGS,
    SMALLEST,
    TOLERANCE,
    VARIANTS,
    engines_of,
)
from tests.support.models.adapter_contents import CONTENTS, content
from tests.support.selection import some_slow

DEFAULT_EXAMPLES = 20_000
FULL, SLOW = pytest.mark.full, pytest.mark.slow

COMMON = (
    "none", "align", "all", "aborted", "withdrawn", "failures", "preemptions", "states_evicted", "pages_evicted",
    "page_copies", "full_hits", "cached_tokens",
)  # fmt: skip
REACHED = (*COMMON, *MODELS, "debug", "prompt_logprobs", *SAMPLINGS, "stop text")
REACHED_WITH_DRAFTS = (
    *COMMON, *DRAFTING_MODELS, "prompt_logprobs", "layer", "drafts_cut", "accepted ngram",
    *(f"drafted {source}" for source in SOURCES), *(f"K {count}" for count in COUNTS),
)  # fmt: skip
FEW = ("align", "all", "aborted", "failures", "full_hits", "page_copies", "cached_tokens")
"""What a handful of traces meets, too."""
WITH_DRAFTER = ("none", "align", "all", "preemptions", "full_hits", "cached_tokens", "layer", "drafted mtp")
SPLIT = (
    "none", "align", "all", "nemotronh", "joined", "full", "recompute-last", "arrived", "failed", "late", "spared",
    "pages_spared", "aborted", "withdrawn", "failures", "preemptions", "stores lost there", "taken back",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_tokens_are_divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members divide the larger prefill steps, and not the smaller ones of invariant engines."""
    if "members" in request.node.name:  # programs of one device are taken from disk
        monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 9)


@pytest.mark.smoke
@pytest.mark.parametrize("name", some_slow(PROGRAMS, *(PROGRAMS.keys() - {"nemotronh", "kimi", "selective"})))
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


@pytest.mark.full
def test_the_references_are_those_of_the_merged_weights() -> None:
    """One at a time through the engine is the same as a model with the adapter in its weights, without any store."""
    on, prompt = engines_of(f"{SMALLEST}, adapters"), tuple(range(3, 20))
    lines = [on.alone(prompt, adapter=LoRARequest("x", 0, str(number)))[0] for number in range(len(CONTENTS))]
    assert len({tuple(line.tokens) for line in (*lines, *on.alone(prompt))}) == 1 + len(CONTENTS)
    for number, line in enumerate(lines):
        if CONTENTS[number] != "lora":
            continue
        model = nnx.clone(on.model)
        for path, layer in adaptable_layers(model).items():
            a, b = content(on.model, number).layers[path]
            layer.weight[...] = layer.weight[...] + (b @ a).reshape(layer.weight.shape)
        tokens = [*prompt, *line.tokens]
        logits = model(np.array([tokens]), np.array([len(tokens)]))[0]
        said = np.asarray(jax.nn.log_softmax(logits))[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(said, np.array(line.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(line.logprobs, chosen, atol=TOLERANCE)


def examples(request: pytest.FixtureRequest, per_trace: int, least: int) -> int:
    """How many traces to run: each counts as so many symbolic schedules of `--examples N`."""
    return max(least, request.config.option.examples // per_trace)


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(4))
def test_traces(shard: int, request: pytest.FixtureRequest) -> None:
    """At least 700, which are 100 for each recurrence, where N is 20,000 or more."""
    total = examples(request, 33, 4)
    total = max(total, 700) if total >= DEFAULT_EXAMPLES // 33 else total
    run_traces(shard * 1_000_000, total // 4, reached=REACHED if total >= 700 else ())
    for name in PROGRAMS:
        assert engines_of(name).programs.compilations <= PROGRAMS[name], "a trace has compiled something"


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(2))
def test_traces_with_drafts(shard: int, request: pytest.FixtureRequest) -> None:
    """Which source a request has, and how many drafts, is its own: one step verifies drafts of all kinds."""
    count = examples(request, 250, 80) // 2
    met = run_traces(50_000_000 + shard * 1_000_000, count, reached=REACHED_WITH_DRAFTS, drafts=True)
    # Scripts that are right are always accepted, but for what a near-tie has turned; what is wrong never is.
    assert met["wasted right"] <= met["cut"] * 24
    for name in set(DRAFTING_MODELS):
        # Seats with and without penalties, page tables, prefill, and decoding with and without drafts.
        assert drafters(name).programs_of().compilations <= 6, "a trace has compiled something"


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("drafts", [False, True], ids=["without drafts", "with drafts"])
def test_with_a_split(drafts: bool, request: pytest.FixtureRequest) -> None:
    """The seeds of the traces without a split: each of them is run both ways. Those with drafts are longer."""
    count = examples(request, 1000 if drafts else 400, 20)
    reached = (*SPLIT, "layer") if drafts else SPLIT
    run_traces(50_000_000 if drafts else 0, count, reached=reached, drafts=drafts, split=True)


def case(
    name: str, first: int, count: int, reached: Sequence[str], *, mark: Any = FULL, ties: float = 1 / 200, **how: Any
) -> Any:
    """`count` traces from seed `first` on, that meet what is named in `reached`. `how`, `ties`: see `run_traces`."""
    return pytest.param(first, count, reached, ties, how, id=name, marks=mark)


RECURRENCES = ("nemotronh", "joined", "kimi", "lightning", "selective")
REPLAY = {"replay": 8}
ANCHORS = ("anchors",)
KINDS = ("lora", "state", "both", "no adapter")
FEW_ADAPTED = ("cached_tokens", "full_hits", "adapters waited")
ARRIVED = ("full", "recompute-last", "arrived", "spared")


def adapted(what: str, first: int, count: int, reached: Sequence[str], **more: Any) -> Any:
    """Most requests have one of several adapters: names get new content while requests run, entries are few."""
    return case(f"adapters, {what}", first, count, (*KINDS, *reached), adapters=True, **more)


NEEDS_NATIVE = pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}")


def bits(model: str, dtype: str, count: int, *reached: str, **how: Any) -> Any:
    """Of schedule-invariant engines: equal bits have no ties. Those of prompts are the training forward's."""
    name = f"{model}, invariant {dtype}"
    what, marks = ", ".join((name, *how)), (FULL, NEEDS_NATIVE)
    return case(what, 70_000_000, count, ("cached_tokens", *reached), mark=marks, ties=0, model=name, **how)


CASES = [
    case("a few", 0, 4, ("all", "cached_tokens"), mark=(), model="nemotronh"),
    case("drafts, a few", 50_000_000, 4, ("drafted mtp", "layer"), mark=(), drafts=True, model=SMALLEST),
    *(
        case(f"drafts, {model}", 54_000_000, 25, ("align", "all", "failures", "full_hits", "accepted ngram"),
             drafts=True, model=model)
        for model in ("windowed", "griffin")
    ),
    # A drafter with weights, keys and a vocabulary of its own takes the place of the draft layer.
    *(
        case(f"drafter {model}, replay {replay}", 52_000_000, 24, WITH_DRAFTER, drafts=True, model=model, replay=replay)
        for model, replay in (("eagle3", None), ("dflash", 8))
    ),
    case("replay, a few", 0, 8, (*FEW, *ANCHORS), mark=(), model=SMALLEST, **REPLAY),
    case("replay", 0, 30, (*COMMON, *ANCHORS), model=SMALLEST, **REPLAY),
    case("replay, drafts", 50_000_000, 30, (*COMMON, *ANCHORS, "drafts_cut", "layer"), drafts=True, model="nemotronh",
         **REPLAY),
    # Tails of the delta rule hold what a token added to the state, found as it was absorbed.
    case("replay, drafts, joined", 51_000_000, 25, (*COMMON, *ANCHORS, "layer"), drafts=True, model="joined", **REPLAY),
    # Decays by channel, fixed decays, and decays for each channel and entry, which the replay computes again.
    *(
        case(f"replay, drafts, {model}", first, 8, (*FEW, *ANCHORS), drafts=True, model=model, mark=mark, **REPLAY)
        for first, model, mark in ((52_000_000, "kimi", FULL), (53_000_000, "lightning", SLOW),
                                   (54_000_000, "selective", FULL))
    ),
    # Up to R / 2 - 1 drafts, and never more than 5; requests have 0, 1, 3 and 5 of them and other numbers.
    *(
        case(", ".join((f"more, replay {replay}, {model}", *how)), first, count, (*COMMON, *ANCHORS), mark=SLOW,
             model=model, replay=replay, **how)
        for how, models, intervals, first, count in (
            ({}, MODELS, (2, 4, 8, 16, 32, 64), 1_000, 150),
            ({"drafts": True}, RECURRENCES, (4, 8, 16, 32, 64), 50_001_000, 100),
            ({"drafts": True, "split": True}, RECURRENCES, (8, 32), 50_002_000, 100),
        )
        for model in models
        for replay in intervals
    ),
    case("more, split", 300, 400, SPLIT, mark=SLOW, split=True),
    case("more, split, drafts", 50_000_300, 200, SPLIT, mark=SLOW, split=True, drafts=True),
    # The prefill side has rows of either form.
    case("replay, split", 0, 40, (*COMMON, *ANCHORS, "full", "recompute-last", "arrived"), split=True,
         model="nemotronh", **REPLAY),
    # References come from requests that run alone, so that none of their steps is mixed.
    case("mixed steps", 60_000_000, 40, FEW, mixed=True, model="nemotronh"),
    *(
        case(f"mixed steps, replay {replay}, {model}", 61_000_000, 10, (), mark=mark, mixed=True, model=model,
             replay=replay)
        for model in MODELS
        for replay, mark in ((None, FULL if model in ("joined", "kimi") else SLOW), (8, SLOW))
    ),
    *(
        case(f"mixed steps, drafts, replay {replay}", 62_000_000, 30, ("all", "full_hits", "layer"), mark=mark,
             mixed=True, drafts=True, model="nemotronh", replay=replay)
        for replay, mark in ((None, SLOW), (8, FULL))
    ),
    # A state in 16 bits is rounded where it is stored: after each token of a decode step, but in prefill only where a
    # chunk ends. So what was reused, and how a prompt was cut, shows in log-probabilities, within a bound
    # (`shared_engines.VARIANTS`; measured over 24 traces: 0.005 with bfloat16, 0.001 with float16). Keys and values are
    # rounded once, when they are written.
    *(
        case(variant, 5_000_000, 16, ("align", "all", "preemptions", "page_copies", "full_hits", "cached_tokens"),
             ties=1 / 4, model=variant,
             mark=SLOW if variant == "float16 states" else (FULL, NEEDS_NATIVE) if "invariant" in variant else FULL)
        for variant in VARIANTS
    ),
    # Rows that are rounded at multiples of B: cold runs, hits, drafts, replay, a split all say the same.
    *(
        case(f"{variant}, {way}", 5_100_000, 16, ("align", "all", "cached_tokens"), ties=1 / 50, model=variant,
             mark=FULL if (variant[:4], way) == ("int8", "replay, drafts") else SLOW, **how)
        for variant in EXACT
        for way, how in {"snapshots": {}, "drafts": {"drafts": True}, "replay, drafts": {"drafts": True, **REPLAY},
                         "split": {"split": True}}.items()
    ),
    # Each says with its adapter what it says with it alone.
    adapted("a few", 70_000_000, 3, FEW_ADAPTED, mark=(), model=SMALLEST),
    *(
        adapted(model, 71_000_000, 60, (*FEW_ADAPTED, "none", "align", "all", "aborted", "failures", "preemptions",
                                        "states_evicted", "pages_evicted"), model=model,
                mark=FULL if model == "joined" else SLOW)
        for model in ("nemotronh", "joined", "kimi")
    ),
    # Another engine with the same adapters computes most prompts.
    adapted("split, a few", 76_000_000, 6, ARRIVED, split=True, model=SMALLEST),
    *(
        adapted(f"split, {model}", 77_000_000, 30, (*ARRIVED, "failed", "aborted"), split=True, model=model, mark=SLOW)
        for model in ("nemotronh", "joined")
    ),
    # Not from 72_000_000: with seed 72_000_018, a drawn number is within 3e-8 of the bound between two tokens.
    *(
        adapted(f"drafts, replay {replay}", 75_000_000, 40, (*FEW_ADAPTED, "drafts_cut"), drafts=True,
                model="nemotronh", replay=replay, mark=mark)
        for replay, mark in ((None, SLOW), (8, FULL))
    ),
    *(
        adapted(f"replay, {model}, mixed {mixed}", 73_000_000, 40, (*FEW_ADAPTED, *ANCHORS), model=model, mixed=mixed,
                mark=FULL if (model, mixed) == ("joined", False) else SLOW, **REPLAY)
        for model in ("nemotronh", "joined")
        for mixed in (False, True)
    ),
    # Steps of invariant engines have several shapes.
    *(
        bits(model, ("float32", "bfloat16")[number % 2], 5, *reached, **how)
        for number, model in enumerate(INVARIANT_MODELS)
        for reached, how in (((), {}), (("arrived",), {"split": True}))
    ),
    bits(SMALLEST, "bfloat16", 10, *(f"accepted {source}" for source in ("mtp", "ngram", "right", "mixed")),
         drafts=True),
    bits("joined", "float32", 4, "mixed", mixed=True),
    bits("joined", "bfloat16", 5, "lora", adapters=True),
    # Members of several devices, with what their traces above do not have.
    *(
        case(f"{MEMBERS}, {way}", 50_000_000, 5, ("cached_tokens", *reached), mark=(mark, NEEDS_NATIVE), ties=0,
             model=MEMBERS, **{way: True})
        for way, mark, reached in (("split", FULL, ("arrived",)), ("adapters", SLOW, ("lora", "state")),
                                   ("drafts", SLOW, ("layer", "accepted right")))
    ),
]  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize(("first", "count", "reached", "ties", "how"), CASES)
def test_traces_of_other_kinds(
    first: int, count: int, reached: Sequence[str], ties: float, how: dict[str, Any]
) -> None:
    met = run_traces(first, count, reached=reached, ties=ties, **how)
    assert met["mixed"] > count or not how.get("mixed")
    assert ties or not met["cut"]
    if "two members" in (model := how.get("model", "")) and "adapters" not in how:
        cache = engines_of(model).programs.cache
        divided = {" all-to-all(" in compiled.as_text() for name, compiled in cache if name == "PrefillBatch"}
        assert divided == ({False, True} if engines_of(model).invariant else {True})


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("how", ["plain", "drafts", "split", "adapters", "mixed"])
@pytest.mark.parametrize("model", INVARIANT)
def test_more_bits(model: str, how: str, request: pytest.FixtureRequest) -> None:
    """`--examples` is the number of requests of all cases together; a trace has at least 5 on average."""
    count = max(1, examples(request, 5 * 5 * len(INVARIANT), 1))
    met = run_traces(
        70_001_000, count, reached=("cached_tokens",), model=model, **({how: True} if how != "plain" else {})
    )
    assert not met["cut"]
