"""What one request may ask for: stops, deltas, log-probabilities of given ids; and what is refused."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from serving.core.errors import RequestError
from serving.engine.requests.request import EngineRequest
from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import finish
from tests.support.engines.replicas import serving


@pytest.fixture(scope="module")
def engine(harness):
    return harness.engine("all")


@pytest.fixture(scope="module")
def greedy(harness, engine):
    """A prompt and its 12 greedy tokens, no two alike among the first ones."""
    for seed in range(50):
        prompt = harness.prompt(random.Random(seed), 20)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        tokens = harness.run(engine, [prompt], params)[0].outputs[0].token_ids
        if len(set(tokens[:6])) == 6:
            return prompt, tokens
    raise AssertionError("every output repeats itself")


def ask(harness, engine, prompt, **params):
    """One greedy request, unless `params` say otherwise."""
    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    (output,) = harness.run(engine, [prompt], SamplingParams(**given))
    return output


def test_deltas_add_up_to_the_whole_output(harness, engine, greedy):
    prompt, tokens = greedy
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[f"w{tokens[8]} w{tokens[9]}"])
    engine.add_request("live", {"prompt_token_ids": prompt}, params, live=True)
    deltas = []
    while not (deltas and deltas[-1].finished):
        deltas += engine.step()
    finish(engine)
    whole, pieces = deltas[0].copy(), [choice for delta in deltas for choice in delta.outputs]
    for delta in deltas[1:]:
        whole.extend(delta)
    plain = ask(harness, engine, prompt, stop=params.stop).outputs[0]
    assert whole.outputs == [plain]
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == plain.text
    assert f"w{tokens[9]}" not in plain.text.split()[8:]


def test_stop_ids_and_end_of_sequence(harness, engine, greedy, monkeypatch):
    prompt, tokens = greedy
    output = ask(harness, engine, prompt, stop_token_ids=[tokens[2]]).outputs[0]
    assert (output.token_ids, output.stop_reason) == (tokens[:3], tokens[2])
    assert output.text == " ".join(f"w{t}" for t in tokens[:2])
    monkeypatch.setattr(engine, "eos_token_ids", (tokens[4],))
    ended = ask(harness, engine, prompt, ignore_eos=False).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[:5], "stop", None)
    assert ended.text == " ".join(f"w{t}" for t in tokens[:4])
    later = ask(harness, engine, prompt, ignore_eos=False, min_tokens=7).outputs[0]
    assert later.token_ids[:4] == tokens[:4]
    assert len(later.token_ids) >= 7
    assert tokens[4] not in later.token_ids[:6]


@pytest.mark.parametrize("alternatives", [None, 2])
def test_prompt_logprobs_of_given_ids(harness, engine, alternatives):
    rng = random.Random(6)
    prompt, others = harness.prompt(rng, 100), harness.prompt(rng, 20)  # prefilled in several chunks, with neighbors
    ids = [996, 0, prompt[5], *rng.sample(range(997), 125)]
    plain = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0)
    asked = replace(plain, n=2, prompt_logprob_token_ids=ids, prompt_logprobs=alternatives)
    harness.run(engine, [others, prompt, others], [plain, replace(plain, n=2), plain])
    compiled = engine.stats()["compilations"]
    neighbor = replace(plain, prompt_logprob_token_ids=[7])
    outputs = harness.run(engine, [others, prompt, others], [neighbor, asked, neighbor])
    assert engine.stats()["compilations"] == compiled
    tables = outputs[1].prompt_logprobs
    expected = harness.log_probs(prompt)
    assert tables[0] is None
    for at, table in enumerate(tables[1:], start=1):
        best = np.argsort(-expected[at - 1])[: alternatives or 0].tolist()
        assert next(iter(table)) == prompt[at]
        assert set(table) == {prompt[at], *ids, *best}
        assert [token for token, entry in table.items() if entry.rank] == best or alternatives
        for token, entry in table.items():
            assert entry.logprob == pytest.approx(expected[at - 1, token], abs=2e-4)
    expected = harness.log_probs(others)
    for output in (outputs[0], outputs[2]):
        for at, table in enumerate(output.prompt_logprobs[1:], start=1):
            assert list(table) == list(dict.fromkeys([others[at], 7]))
            assert table[7].logprob == pytest.approx(expected[at - 1, 7], abs=2e-4)


UNKNOWN = "997 is not in the vocabulary (0 to 996)"


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ({"prompt_token_ids": []}, {}, "the prompt is empty"),
        ({"prompt_token_ids": [997]}, {}, UNKNOWN),
        ({"prompt_token_ids": [-1]}, {}, "-1 is not in the vocabulary"),
        ({"prompt_token_ids": [1.5]}, {}, "must be a list of integers"),
        ({"prompt_token_ids": "12"}, {}, "must be a list of integers"),
        ({"prompt_token_ids": None}, {}, "must be a list of integers"),
        ({"prompt_token_ids": [3] * 160}, {}, "the prompt has 160 tokens: at most 159 are allowed"),
        ("w5", {"prompt_logprob_token_ids": [5, 997]}, f"prompt_logprob_token_ids: token id {UNKNOWN}"),
        ({"prompt": 3}, {}, "a prompt must be a text, got int"),
        ({"prompt": "w5", "multi_modal_data": {"image": 1}}, {}, "field 'multi_modal_data' is not supported"),
        ({}, {}, "a prompt is a text"),
        ("", {}, "the prompt is empty"),
        ("w5", {"logit_bias": {997: 1.0}}, f"token id {UNKNOWN}"),
        ("w5", {"return_sampling_mask": True}, "return_sampling_mask needs the flag enable_return_sampling_mask"),
        ("w5", {"reasoning": {"budget": 1}}, "reasoning: a budget needs a tokenizer, and the flag"),
    ],
)
def test_requests_that_cannot_be_served(engine, prompt, params, said):
    with pytest.raises(RequestError) as error:
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert said in str(error.value)
    assert (engine.num_unfinished, engine.busy) == (0, False)


async def test_a_reader_that_comes_late_gets_all_tokens(harness):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = harness.run(harness.engine(), [[5]], params)
    async with serving(harness.engine()) as served, asyncio.timeout(60):
        stream = served.stream(EngineRequest("late", {"prompt_token_ids": [5]}, params, live=True))
        begun = list((await anext(stream)).outputs[0].token_ids)
        while await served.call(lambda engine: engine.num_unfinished):
            await asyncio.sleep(0.01)
        rest = [token async for part in stream for token in part.outputs[0].token_ids]
    assert begun + rest == list(output.outputs[0].token_ids)
