"""Many streams at once, some of whose clients leave at any moment: nothing leaks, and no token is lost or doubled."""

import asyncio
import contextlib
import json
import random

import httpx
import pytest

TOKENS = 16


async def read(client: httpx.AsyncClient, prompt: list[int], leave_after: int | None, choices: list[dict]) -> None:
    """Appends the choice of each event of a stream, and an empty one where the stream says that it is done."""
    body = {
        "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "logprobs": 0,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                choices.append({})
            elif line.startswith("data: "):
                assert not choices or choices[-1]["finish_reason"] is None
                choices.append(json.loads(line[6:])["choices"][0])
                if leave_after is not None and len(choices) >= leave_after:
                    return


async def crowd(server, count: int, rng: random.Random) -> list[tuple[list[int], list[dict], bool]]:
    """The choices of `count` streams of which about a third is left: before the first event, or after some."""
    shared = [rng.randrange(10, 2000) for _ in range(40)]
    found = []
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(prompt: list[int], leave_after: int | None, seconds: float | None) -> None:
            await asyncio.sleep(rng.random())
            choices: list[dict] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await read(client, prompt, leave_after, choices)
            found.append((prompt, choices, leave_after is None and seconds is None))

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                # Some share a prefix, some a whole prompt, most are like no other.
                prompt = shared[: rng.randrange(1, 40)] if rng.random() < 0.4 else []
                prompt = prompt + [rng.randrange(10, 2000) for _ in range(rng.randrange(0 if prompt else 1, 30))]
                how = rng.random()
                leave_after = rng.randrange(1, 12) if how < 0.25 else None
                seconds = rng.random() * 0.5 if 0.25 <= how < 0.35 else None
                group.create_task(one(prompt, leave_after, seconds))
    return found


def check(server, found) -> None:
    server.assert_idle()
    whole = [(prompt, choices) for prompt, choices, stayed in found if stayed]
    assert len(whole) > len(found) // 3
    prompts, options = [prompt for prompt, _ in whole], {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    expected = server.complete(prompts, max_tokens=TOKENS, **options).json()["choices"]
    for (_, choices), other in zip(whole, expected, strict=True):
        *choices, done = choices
        assert done == {}
        assert choices[-1]["finish_reason"] == "length"
        token_ids = [token for choice in choices for token in choice["token_ids"]]
        logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
        assert len(token_ids) == len(logprobs) == TOKENS
        at = next((j for j, (a, b) in enumerate(zip(token_ids, other["token_ids"], strict=True)) if a != b), None)
        if at is None:
            assert "".join(choice["text"] for choice in choices) == other["text"]
        else:
            # Differently shaped matmuls may decide a tie differently; nothing else may differ.
            assert logprobs[at] == pytest.approx(other["logprobs"]["token_logprobs"][at], abs=1e-3)
    for _, choices, stayed in found:
        assert stayed or sum(len(choice.get("token_ids", ())) for choice in choices) <= TOKENS
    assert server.metric("mamba_jax_http_requests_in_flight") == 1  # the one that asks


@pytest.mark.smoke
@pytest.mark.parametrize("count", [20, 60])
def test_sixty_streams(server, count):
    compiled = server.metric("mamba_jax_compilations_total")
    check(server, asyncio.run(crowd(server, count, random.Random(5))))
    assert server.metric("mamba_jax_compilations_total") == compiled


def test_clients_that_leave_before_the_answer(server):
    """Without a stream, too, a request ends with its client."""
    aborted = server.metric('mamba_jax_requests_finished_total{reason="abort"}')
    for _ in range(3):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                server.url + "/v1/completions", timeout=0.2,
                json={"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 4, "temperature": 1.0},
            )  # fmt: skip
    server.assert_idle()
    assert server.metric('mamba_jax_requests_finished_total{reason="abort"}') >= aborted + 3
