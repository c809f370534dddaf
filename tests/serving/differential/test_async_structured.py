"""Structured outputs of many tasks at once on an `AsyncEngine`, with and without drafts, say what each says alone."""

import asyncio
import random

import pytest

from mamba_jax.drafts import NGramDrafts
from mamba_jax.programs import StepPrograms
from serving import AsyncEngine, SamplingParams
from serving.engine.request_error import RequestError
from tests.support.engines.engines import QUICK_COMPILE
from tests.support.engines.shared_engines import SMALLEST, TILE, engines_of
from tests.support.models.letter_tokens import EOS, TOO_BIG, WORDS
from tests.support.models.tiny_configs import ENGINE_VOCAB

FORMS = (
    {"regex": "[a-z]{3}-[0-9]{2}"},
    {"choice": ["ab", "abba", "x"]},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"json": {"enum": ["a", "b"]}},
    {"grammar": 'start: "x" | ' + TOO_BIG},
    None,
)


@pytest.fixture(scope="module", params=[(0, 1), (2, 1), (2, TILE)], ids=["no drafts", "drafts", "drafts, replay"])
def make(request):
    """Engines with so many drafts; those that cache hold rows by anchors so far apart."""
    on, (count, interval) = engines_of(SMALLEST), request.param
    source = NGramDrafts(1, 3) if count else None
    programs = StepPrograms(on.model, tile_size=TILE, source=source, compiler_options=QUICK_COMPILE)
    drafts = {"num_speculative_tokens": count, "speculative_method": "ngram"} if count else {}
    flags = {"num_slots": 40, "enable_structured_outputs": True} | drafts

    def engine(mode):
        replay = {"replay_interval": interval if mode == "all" else 1}
        return on.engine(mode, programs=programs, eos_token_ids=(EOS,), **flags, **replay)

    return engine


def ask(seed: int) -> tuple[dict, SamplingParams]:
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]), seed=seed, max_tokens=12, structured_outputs=FORMS[seed % len(FORMS)]
    )
    return {"prompt_token_ids": [rng.randrange(ENGINE_VOCAB) for _ in range(rng.randrange(1, 40))]}, params


async def said(served: AsyncEngine, seed: int) -> tuple:
    prompt, params = ask(seed)
    try:
        async for output in served.generate(prompt, params):
            last = output
    except RequestError as error:
        return ("error", str(error).split(":")[0])
    return (last.outputs[0].finish_reason, *last.outputs[0].token_ids)


@pytest.mark.smoke
def test_what_each_says_alone(make):
    seeds = range(24)

    async def alone(served):
        return [await said(served, seed) for seed in seeds]

    async def together(served):
        return await asyncio.gather(*(said(served, seed) for seed in seeds))

    answers = []
    for mode, way in (("none", alone), ("all", together)):
        engine = make(mode)
        served = AsyncEngine(engine)
        try:
            answers.append(asyncio.run(asyncio.wait_for(way(served), 300)))
        finally:
            served.shutdown()
        engine.loop.scheduler.check(idle=True)
    assert answers[0] == answers[1]
    ends = {answer[0] for answer in answers[0]}
    assert {"stop", "length"} <= ends
    texts = ["".join(WORDS[token] for token in answer[1:]) for answer in answers[0][1 :: len(FORMS)]]
    assert set(texts) <= {"ab<eos>", "abba<eos>", "x<eos>", "ab", "abba", "x"}
