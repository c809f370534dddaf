"""Random traffic through real tiny models says what greedy decoding says.

Cache mode, chunking, batch mix, shared prefixes, repeats, preemption, aborts, seeds, several choices, failing and
withdrawn steps: a trace mixes them all. Drafts of any source and count, rows that are held by an anchor and the inputs
since, a prefill side, and steps that mix decode and prefill rows come in addition. See `traces.draw` for what a seed
decides.
"""

from typing import Any

import numpy as np
import pytest

from tests.serving.differential.drafting import COUNTS, SOURCES, drafters
from tests.serving.differential.judging import TOLERANCE
from tests.serving.differential.traces import DRAFTING_MODELS, run_traces
from tests.support.engines.shared_engines import PROGRAMS, SAMPLINGS, engines_of
from tests.support.selection import slow

DEFAULT_EXAMPLES = 20_000

COMMON = (
    "none", "align", "all", "aborted", "withdrawn", "failures", "preemptions", "states_evicted", "pages_evicted",
    "page_copies", "full_hits", "cached_tokens",
)  # fmt: skip
REACHED = (
    *COMMON, "nemotronh", "mamba2", "falconh1", "delta", "short_conv", "kimi", "lightning", "selective", "debug",
    "prompt_logprobs", *SAMPLINGS, "stop text",
)  # fmt: skip
REACHED_WITH_DRAFTS = (
    *COMMON, *DRAFTING_MODELS, "prompt_logprobs", "layer", "drafts_cut", "accepted ngram",
    *(f"drafted {source}" for source in SOURCES), *(f"K {count}" for count in COUNTS),
)  # fmt: skip
FEW = ("align", "all", "aborted", "failures", "full_hits", "page_copies", "cached_tokens")
"""What a handful of traces meets, too."""
WITH_DRAFTER = ("none", "align", "all", "preemptions", "full_hits", "cached_tokens", "layer", "drafted mtp")
SPLIT = (
    "none", "align", "all", "nemotronh", "falconh1", "full", "recompute-last", "arrived", "failed", "late", "spared",
    "pages_spared", "aborted", "withdrawn", "failures", "preemptions", "stores lost there", "taken back",
)  # fmt: skip
MODELS = ("nemotronh", "mamba2", "falconh1", "delta", "short_conv", "kimi", "lightning", "selective")


def examples(request: pytest.FixtureRequest, per_trace: int, least: int) -> int:
    """How many traces to run: each counts as so many symbolic schedules of `--examples N`."""
    return max(least, int(request.config.getoption("--examples", default=DEFAULT_EXAMPLES)) // per_trace)


@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(4))
def test_traces(shard: int, request: pytest.FixtureRequest) -> None:
    """At least 700, which are 100 for each recurrence, where N is 20,000 or more."""
    total = examples(request, 33, 0)
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
        assert drafters(name).programs.compilations <= 6, "a trace has compiled something"


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("drafts", [False, True], ids=["without drafts", "with drafts"])
def test_with_a_split(drafts: bool, request: pytest.FixtureRequest) -> None:
    """The seeds of the traces without a split: each of them is run both ways. Those with drafts are longer."""
    count = examples(request, 1000 if drafts else 400, 20)
    reached = (*SPLIT, "layer") if drafts else SPLIT
    run_traces(50_000_000 if drafts else 0, count, reached=reached, drafts=drafts, split=True)


def case(name: str, first: int, count: int, reached: tuple[str, ...], *, full: bool = True, **how: Any) -> Any:
    """`count` traces from seed `first` on, that meet what is named in `reached`."""
    return pytest.param(first, count, reached, how, id=name, marks=[pytest.mark.full] if full else [])


REPLAY = {"replay": 8}
ANCHORS = ("anchors",)
CASES = [
    *(
        case(f"drafts, {model}", 54_000_000, 25, ("align", "all", "failures", "full_hits", "accepted ngram"),
             drafts=True, model=model)
        for model in ("selective", "windowed", "griffin")
    ),
    # A drafter with weights, keys and a vocabulary of its own takes the place of the draft layer.
    *(
        case(f"drafter {model}, replay {replay}", 52_000_000, 24, WITH_DRAFTER, drafts=True, model=model, replay=replay)
        for model in ("eagle3", "dflash")
        for replay in (None, 8)
    ),
    case("replay", 0, 60, (*COMMON, *ANCHORS), full=False, model="nemotronh", **REPLAY),
    case("replay, drafts", 50_000_000, 40, (*COMMON, *ANCHORS, "drafts_cut", "layer"), drafts=True, model="nemotronh",
         **REPLAY),
    # Tails of the delta rule hold what a token added to the state, found as it was absorbed.
    case("replay, drafts, delta", 51_000_000, 25, (*COMMON, *ANCHORS, "layer"), drafts=True, model="delta", **REPLAY),
    # Decays by channel, fixed decays, and decays for each channel and entry, which the replay computes again.
    *(
        case(f"replay, drafts, {model}", first, 8, (*FEW, *ANCHORS), drafts=True, model=model, **REPLAY)
        for first, model in ((52_000_000, "kimi"), (53_000_000, "lightning"), (54_000_000, "selective"))
    ),
    # The prefill side has rows of either form.
    case("replay, split", 0, 40, (*COMMON, *ANCHORS, "full", "recompute-last", "arrived"), split=True,
         model="nemotronh", **REPLAY),
    # References come from requests that run alone, so that none of their steps is mixed.
    case("mixed steps", 60_000_000, 40, FEW, mixed=True, model="nemotronh"),
]  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize(("first", "count", "reached", "how"), CASES)
def test_traces_of_other_kinds(first: int, count: int, reached: tuple[str, ...], how: dict[str, Any]) -> None:
    met = run_traces(first, count, reached=reached, **how)
    assert met["mixed"] > 40 or not how.get("mixed")


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("replay", [None, slow(8)])
def test_mixed_steps_of_each_recurrence(model: str, replay: int | None) -> None:
    assert run_traces(61_000_000, 10, model=model, replay=replay, mixed=True)["mixed"] > 5


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.parametrize("replay", [slow(None), 8])
def test_mixed_steps_with_drafts(replay: int | None) -> None:
    reached = ("all", "full_hits", "layer")
    met = run_traces(62_000_000, 30, reached=reached, drafts=True, model="nemotronh", replay=replay, mixed=True)
    assert met["mixed"] > 30


RECURRENCES = ("nemotronh", "delta", "kimi", "lightning", "selective")
MORE = [
    *(({"model": model, "replay": replay}, 1_000, 150) for model in MODELS for replay in (2, 4, 8, 16, 32, 64)),
    # Up to R / 2 - 1 drafts, and never more than 5; requests have 0, 1, 3 and 5 of them and other numbers.
    *(
        ({"model": model, "replay": replay, "drafts": True}, 50_001_000, 100)
        for model in (*RECURRENCES, "falconh1")
        for replay in (4, 8, 16, 32, 64)
    ),
    *(
        ({"model": model, "replay": replay, "drafts": True, "split": True}, 50_002_000, 100)
        for model in RECURRENCES
        for replay in (8, 32)
    ),
    ({"split": True}, 300, 400),
    ({"split": True, "drafts": True}, 50_000_300, 200),
]


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize(("how", "first", "count"), MORE)
def test_more_traces(how: dict[str, Any], first: int, count: int) -> None:
    run_traces(first, count, reached=(*COMMON, *ANCHORS) if "model" in how else SPLIT, **how)


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
