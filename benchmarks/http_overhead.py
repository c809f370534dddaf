"""The cost of HTTP: the same requests through `Engine` directly and through the server, in turns, in one run.

    python -m benchmarks.http_overhead --model demo --concurrency 32 --tokens 64

The server runs in this process, as `mamba-jax serve` does it; its clients in another. Nothing is streamed unless
`--stream`. Prints tokens per second of both, and the median and the range of the turns' ratios.

    python -m benchmarks.http_overhead --scores --concurrency 16 --prompt-tokens 512 --model DIRECTORY

compares prompts whose tokens are scored, as evaluation harnesses ask for it (`echo`, `logprobs` 1, `max_tokens` 0),
with prompts that only get one token, both by HTTP, in tokens of the prompts per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.turns import in_turns, ratio
from serving.bench.report import emit, environment, spread


def prompts(count: int, length: int, seed: int, vocab_size: int) -> list[list[int]]:
    """Random token ids: nothing to reuse."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]


def offline(engine: Any, many: list[list[int]], tokens: int) -> float:
    """Seconds that the engine takes for all of them, driven by this thread."""
    from serving import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    for i, ids in enumerate(many):
        engine.add_request(f"offline-{begin}-{i}", {"prompt_token_ids": ids}, params)
    while engine.num_unfinished:
        engine.step()
    return time.perf_counter() - begin


async def client(url: str, many: list[list[int]], fields: dict[str, Any]) -> float:
    """Seconds that the server takes for all of them at once, in the client's view.

    Bare sockets, since the client's own work is done on the same cores.
    """
    host, port = url.removeprefix("http://").split(":")

    async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port))
        await asked(reader, writer, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return reader, writer

    def request(ids: list[int]) -> bytes:
        body = json.dumps({"prompt": ids, "temperature": 0, "ignore_eos": True} | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    connections = [await connected() for _ in many]
    bodies = [request(ids) for ids in many]
    begin = time.perf_counter()
    await asyncio.gather(*(asked(*pair, body) for pair, body in zip(connections, bodies, strict=True)))
    return time.perf_counter() - begin


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Sends a request and reads all of its answer."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
        return
    (length,) = [line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    await reader.readexactly(int(length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        many, fields = json.loads(sys.stdin.read())
        print(asyncio.run(client(options.client, many, fields)))
        return

    import uvicorn

    from serving.api.http.app import create_app
    from serving.api.http.settings import ServerSettings
    from serving.config import EngineConfig
    from serving.engine.assembly.build import build_engine
    from serving.engine.async_engine import AsyncEngine

    size = options.prompt_tokens + options.tokens + 1
    config = EngineConfig.create(
        model=options.model, max_num_seqs=options.concurrency, max_model_len=max(size, 128), warmup=True,
        max_num_batched_tokens=2048 if options.scores else 512, enable_prefix_caching=False,
        load_format=options.load_format, dtype=options.dtype,
    )  # fmt: skip
    engine = build_engine(config, progress=False).engine
    async_engine = AsyncEngine(engine)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    app = create_app(async_engine, ServerSettings.create(log_requests=False))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=partial(server.run, sockets=[listening]), daemon=True)
    thread.start()
    while not app.state.context.ready:
        time.sleep(0.05)

    command = [sys.executable, "-m", "benchmarks.http_overhead", "--client", url]

    def many(turn: int) -> list[list[int]]:
        return prompts(options.concurrency, options.prompt_tokens, turn, engine.vocab_size)

    def direct(turn: int) -> float:
        # The engine's thread sleeps in a command queue; while it runs this, it is the only one that drives the engine.
        return asyncio.run(async_engine.call(partial(offline, many=many(turn), tokens=options.tokens)))

    def by_http(turn: int, **fields: Any) -> float:
        done = subprocess.run(
            command, input=json.dumps([many(turn), fields]), capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    count, answer = options.tokens, {"max_tokens": options.tokens, "stream": options.stream}
    forms: dict[str, Callable[[int], float]] = {"direct": direct, "http": partial(by_http, **answer)}
    if options.scores:
        count, scored = options.prompt_tokens, {"max_tokens": 0, "echo": True, "logprobs": 1}
        forms = {"prefill": partial(by_http, max_tokens=1), "scores": partial(by_http, **scored)}
    # Everything is compiled; the warm-up turn fills caches.
    seconds = in_turns(forms, options.turns)
    speeds = {name: [options.concurrency * count / one for one in each] for name, each in seconds.items()}
    emit(**environment(options.model))
    for name, each in speeds.items():
        emit(metric=f"{name}_tokens_per_s", v=round(statistics.median(each), 1), spread=spread(each))
    baseline, last = forms
    emit(metric=f"{last}_over_{baseline}", concurrency=options.concurrency, **ratio(speeds[last], speeds[baseline]))
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
