"""Latency of a running server under load: any URL with OpenAI's completions.

    mamba-jax serve --model MODEL &
    mamba-jax bench latency --url http://localhost:8000 --rate 4 --requests 200 --prompt-words 256 --output-tokens 64

Requests arrive at random times, `--rate` a second on average (a Poisson process), whether earlier ones have been
answered or not; `inf` sends all at once. Each streams. Reported, in milliseconds with percentiles: TTFT, from sending
to the first piece of text; ITL, between two pieces (with drafts a piece may be several tokens); TPOT, a request's mean
time for each token after the first; E2E, to the end. A server that falls behind shows in TTFT.

Prompts are made-up words; `--shared` of them are the same for all. Token counts are the server's own (`usage`).

`--long-requests N` also sends N prompts of `--long-prompt-words` at once at the beginning, to measure what many long
prompts cost short ones. Their figures are separate lines.

    mamba-jax serve --model MODEL --max-model-len 16384 &
    mamba-jax bench latency --long-requests 16 --long-prompt-words 8192 --prompt-words 32 --rate 2 --requests 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from serving.bench.report import check_plot, cumulative, emit, environment

PERCENTILES = (50, 90, 95, 99)


@dataclass
class Answer:
    """The result of one request. Times are in seconds."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    """When text came."""
    ended: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def figures(self) -> dict[str, list[float]]:
        """Of this request, in milliseconds."""
        if self.error is not None or not self.pieces:
            return {}
        gaps = np.diff(self.pieces) * 1e3
        tokens = self.usage.get("completion_tokens") or len(self.pieces)
        after = [(self.pieces[-1] - self.pieces[0]) * 1e3 / (tokens - 1)] if tokens > 1 else []
        return {
            "ttft_ms": [(self.pieces[0] - self.sent) * 1e3],
            "itl_ms": gaps.tolist(),
            "tpot_ms": after,
            "e2e_ms": [(self.ended - self.sent) * 1e3],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", "--base-url", default="http://localhost:8000", help="of the server, without /v1")
    parser.add_argument("--model", help="by default the first that the server names")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--rate", "--request-rate", type=float, default=4.0, help="per second; inf = all at once")
    parser.add_argument("--requests", "--num-prompts", type=int, default=100)
    parser.add_argument("--prompt-words", type=int, default=256)
    parser.add_argument("--shared", type=int, default=0, help="words at the beginning that all prompts have in common")
    parser.add_argument("--long-requests", type=int, default=0, help="further requests, sent at once at the beginning")
    parser.add_argument("--long-prompt-words", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="vLLM's field")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a word from the server")
    parser.add_argument("--plot", help="a PNG or SVG file to draw (needs matplotlib)")
    options = parser.parse_args(arguments)
    if not options.rate > 0:
        parser.error(f"--rate {options.rate}: expected more than 0")
    check_plot(options.plot)
    try:
        model, answers, long, seconds = asyncio.run(load(options))
    except httpx.HTTPError as error:
        print(f"latency: {options.url}: {error or type(error).__name__}", file=sys.stderr)
        return 2
    emit(**environment(model, devices=False))
    lines = summary(answers, seconds, options)
    for line in lines + [{"of": "long prompts", **line} for line in summary(long, seconds, options) if long]:
        emit(**line)
    if options.plot:
        gathered = gather(answers)
        shown = {name: gathered[name] for name in ("ttft_ms", "itl_ms") if gathered.get(name)}
        cumulative(shown, options.plot, title=f"{options.rate:g} requests/s, {model}")
    return 1 if any(answer.error for answer in [*answers, *long]) else 0


async def load(options: argparse.Namespace) -> tuple[str, list[Answer], list[Answer], float]:
    """Sends every request at its time; returns the model's name, the answers, those to the long prompts, and how long
    it all took."""
    rng = random.Random(options.seed)
    shared = words(rng, options.shared)
    prompts = [shared + words(rng, options.prompt_words - options.shared) for _ in range(options.requests)]
    long_prompts = [words(rng, options.long_prompt_words) for _ in range(options.long_requests)]
    waits = [0.0 if math.isinf(options.rate) else rng.expovariate(options.rate) for _ in prompts]
    headers = {"Authorization": f"Bearer {options.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(options.timeout)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=timeout) as client:
        model = options.model
        if model is None:
            found = await client.get("/v1/models")
            found.raise_for_status()
            model = found.json()["data"][0]["id"]
        body = {
            "model": model,
            "max_tokens": options.output_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        begin = time.perf_counter()
        long = [asyncio.create_task(ask(client, body | {"prompt": " ".join(prompt)})) for prompt in long_prompts]
        tasks = []
        due = begin
        for prompt, wait in zip(prompts, waits, strict=True):
            due += wait
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(client, body | {"prompt": " ".join(prompt)})))
        answers = await asyncio.gather(*tasks)
        return model, answers, await asyncio.gather(*long), time.perf_counter() - begin


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """One streamed completion."""
    answer = Answer(sent=time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"{response.status_code}: {' '.join(text.split())[:200]}"
                return answer
            async for line in response.aiter_lines():
                now = time.perf_counter()
                if not line.startswith("data:") or line.strip() == "data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    answer.error = str(event["error"])[:200]
                    return answer
                if any(choice.get("text") for choice in event.get("choices", ())):
                    answer.pieces.append(now)
                answer.usage = event.get("usage") or answer.usage
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    return answer


def words(rng: random.Random, count: int) -> list[str]:
    """Made-up words of two to four syllables."""
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    return ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(count)]


def gather(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """All requests' figures together."""
    found: dict[str, list[float]] = {}
    for answer in answers:
        for name, values in answer.figures.items():
            found.setdefault(name, []).extend(values)
    return found


def summary(answers: Sequence[Answer], seconds: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Percentiles, then the requested and received numbers."""
    lines: list[dict[str, Any]] = []
    for name, values in gather(answers).items():
        if values:
            cut = {f"p{p}": round(float(np.percentile(values, p)), 2) for p in PERCENTILES}
            lines.append({"metric": name, "mean": round(float(np.mean(values)), 2), **cut, "count": len(values)})
    good = [answer for answer in answers if answer.error is None]
    usage = [answer.usage for answer in good]
    cached = [(use.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for use in usage]
    lines.append(
        {
            "metric": "load",
            "requests": len(answers),
            "failed": len(answers) - len(good),
            "errors": sorted({answer.error for answer in answers if answer.error})[:3],
            "asked_rate": options.rate if math.isfinite(options.rate) else "inf",
            "done_per_s": round(len(good) / seconds, 3),
            "output_tokens_per_s": round(sum(use.get("completion_tokens", 0) for use in usage) / seconds, 2),
            "prompt_tokens": sum(use.get("prompt_tokens", 0) for use in usage),
            "cached_tokens": sum(cached),
            "seconds": round(seconds, 2),
        }
    )
    return lines
