"""Answers with many log-probabilities: bounded in size, made and sent in parts, the same as in one piece."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from checkpoints import load_tokenizer
from serving.api.http.apis.choices import CompletionWriter
from serving.api.http.connection.streaming import COMMENT, encoded, is_long, json_of, json_parts, next_bytes, start
from serving.api.http.context import ResponseContext
from serving.api.http.endpoints.tokenization import DetokenizeResponse
from serving.api.http.errors import ApiError
from serving.api.http.generation import Job, whole
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.text import _LONG, TextCodec
from serving.engine.requests.output import CompletionOutput, PromptScores, RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.engine.requests.sampling_params import SamplingParams


@pytest.mark.parametrize("length", [5, 700])
def test_parts_together_are_the_whole_answer(length):
    tokenizer = load_tokenizer("demo")
    ids = [20 + i % 60 for i in range(length)]
    body = CompletionRequest.model_validate(
        {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 0, "prompt_logprob_token_ids": [1, 2, 23]}
    )
    writer = CompletionWriter(ResponseContext(TextCodec(tokenizer, 1024), "demo"), body, body, [ids])
    rng, made = np.random.default_rng(length), PromptScores(ids, 2, [1, 2, 23])  # 23 is in the prompt, too
    own, top, of_ids = (-rng.random(shape, np.float32) for shape in (length, (length, 2), (length, 3)))
    top_ids = rng.integers(100, 200, (length, 2)).astype(np.int32)
    for part in (slice(1, 3), slice(3, length)):  # filled in two steps
        made.fill(part.start, own[part], top_ids[part], top[part], of_ids[part])
    output = RequestOutput("r", None, ids, [CompletionOutput(0, finish_reason="length")], True, prompt_logprobs=made)
    response = writer.response(whole([output], writer.job))
    assert is_long(response) == (length > 256)
    parts = json_parts(response, exclude_unset=True)
    pieces = list(iter(lambda: next_bytes(parts), b""))
    assert max(map(len, pieces)) < 100_000
    assert b"".join(pieces) == json_of(response)
    (choice,) = json.loads(json_of(response))["choices"]
    assert choice["text"] == tokenizer.decode(ids, skip_special_tokens=False)
    for each in (*choice["logprobs"].values(), choice["prompt_logprobs"]):
        assert len(each) == length
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own[1:].tolist())
    for at in range(1, length):
        table = choice["prompt_logprobs"][at]
        assert {int(token): value["logprob"] for token, value in table.items()} == {
            token: entry.logprob for token, entry in made[at].items()
        }


@pytest.mark.parametrize(
    ("prompts", "params", "allowed"),
    [
        (1, {"prompt_logprobs": 20, "logprobs": 20}, True),  # one choice of a whole context
        (2, {"prompt_logprob_token_ids": list(range(100))}, True),
        (32, {"prompt_logprob_token_ids": list(range(128))}, False),
        (32, {"prompt_logprobs": 20}, False),
        (32, {}, True),
        (1, {"n": 128, "logprobs": 20, "max_tokens": None}, False),
        (1, {"n": 128, "logprobs": 20, "max_tokens": 100}, True),
        (8, {"n": 128, "return_sampling_mask": True, "max_tokens": None}, False),
        (1, {"max_tokens": None, "experts": 960}, True),  # experts of one choice of a whole context
        (1, {"n": 32, "max_tokens": None, "experts": 960}, True),
        (1, {"n": 128, "max_tokens": 1, "experts": 960}, False),
        (1, {"max_tokens": None, "experts": 1 << 20}, True),
        (64, {"max_tokens": 1, "experts": 960}, False),
    ],
)
def test_the_values_of_a_response_are_bounded(prompts, params, allowed):
    experts = params.pop("experts", 0)
    job = Job(EngineRequest("x", "", SamplingParams(**params)), [[5] * 5000] * prompts)
    if allowed:
        job.check_size(8192, 4096, experts)
        return
    if experts:
        replace(job, request=replace(job.request, return_experts=False)).check_size(8192, 4096, experts)
    with pytest.raises(
        ApiError, match=r"(values of log-probabilities and sampling masks|bytes of routed experts): at most"
    ) as error:
        job.check_size(8192, 4096, experts)
    assert (error.value.status, error.value.code) == (400, "response_too_large")
    assert error.value.param


def test_a_long_answer_is_sent_in_parts(server):
    ids = list(range(20, 120))
    prompt = [30 + i % 40 for i in range(400)]
    body = {"model": "demo", "prompt": prompt, "prompt_logprob_token_ids": ids, "max_tokens": 1, "temperature": 0}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.headers["content-type"] == "application/json"
    whole = answer.json()["choices"][0]["prompt_logprobs"]
    assert [len(table) for table in whole[1:]] == [101 - (token in ids) for token in prompt[1:]]
    streamed = server.http.post("/v1/completions", json=body | {"stream": True}).text
    first = next(line for line in streamed.splitlines() if line.startswith("data: "))  # a slow server keeps alive
    assert json.loads(first.removeprefix("data: "))["choices"][0]["prompt_logprobs"] == whole
    refused = server.http.post("/v1/completions", json=body | {"prompt": [prompt] * 64})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_too_large")


async def test_a_stream_is_kept_alive_until_its_first_event(monkeypatch):
    async def run(seconds, interval=0.05):
        async def events():
            await asyncio.sleep(seconds)
            yield b"first"
            yield b"second"

        return [event async for event in await start(events(), interval=interval)]

    monkeypatch.setattr("serving.api.http.connection.streaming._FIRST_EVENT_SECONDS", 0.1)
    assert await run(0) == [b"first", b"second"]
    comments = await run(0.5)
    assert comments[-2:] == [b"first", b"second"]
    assert set(comments[:-2]) == {COMMENT}
    assert await run(0.3, interval=0) == [b"first", b"second"]


@pytest.mark.parametrize("length", [2, 1 << 17])
async def test_an_answer_does_not_wait_for_long_texts(length):
    sizes, text = [], "é" * length

    async def run(size, function):
        sizes.append(size)
        return function()

    parts = [part async for part in encoded(run, DetokenizeResponse.model_construct(prompt=text))]
    assert json.loads(b"".join(parts)) == {"prompt": text}
    assert all(size < _LONG for size in sizes)
    assert bool(sizes) == (length > 2)
