"""How much other clients' attacks slow a client with short streams: gaps between its events and number of its streams.

    python -m benchmarks.bystander --model demo --turns 3 --seconds 6
    python -m benchmarks.bystander --url http://127.0.0.1:8000 --attacks headers

Without `--url` it starts a server. Each turn measures the client in the control and then while another process sends
the attack. In the control the client is alone; with `--control ordinary` there is a second client that attacks
nothing, since any second client takes its share of the engine. One row per attack: the 99th percentile of the gaps and
the streams per second of both, and their ratios. The client, the attacker and the server share this machine's cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_GAP, FEWEST_STREAMS = 3.0, 0.8
"""The bounds that the last column compares the two ratios with."""
Request = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers."""


def stop_texts(i: int) -> Request:
    """64 texts that are almost what the model writes: as long as the server allows, and far longer in turn."""
    length = 7000 if i % 2 else 61
    stop = [f"{'a' * length}{end:02x}" for end in range(64)]
    return COMPLETIONS, {"prompt": "a" * 20, "max_tokens": 150, "ignore_eos": True, "stop": stop}, {}


def grammars(i: int) -> Request:
    """An ambiguous grammar of 41 characters; each request's differs."""
    grammar = f"start: s\ns: s s s | s s | /[a-z{i % 10}]/ |"
    return COMPLETIONS, {"prompt": "x", "max_tokens": 40, "structured_outputs": {"grammar": grammar}}, {}


def choices(i: int) -> Request:
    """128 choices of each of 8 prompts."""
    return COMPLETIONS, {"prompt": ["x", "y"] * 4, "n": 128, "max_tokens": 400, "ignore_eos": True, "seed": i}, {}


def templates(i: int) -> Request:
    """Chats of many messages, with variables for the template."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 20
    body = {"messages": [*messages, messages[0]], "max_tokens": 1, "chat_template_kwargs": {f"name_{i}": [1] * 100}}
    return CHAT, body, {}


def headers(i: int) -> Request:
    """Headers that a client of ours would refuse to send on."""
    values = ("abc ", "\tabc\t", "caf\xe9", "k" * 30_000)
    names = ("x-request-id", "traceparent", "x-api-key", "tracestate")
    return COMPLETIONS, {"prompt": "x", "max_tokens": 1}, {names[i % 4]: values[i // 4 % 4]}


def ordinary(i: int) -> Request:
    """No attack: what any second client costs."""
    return COMPLETIONS, {"prompt": f"{i} x", "max_tokens": 150, "ignore_eos": True}, {}


ATTACKS: dict[str, Callable[[int], Request]] = {
    "(ordinary)": ordinary,
    "stop texts": stop_texts,
    "grammars": grammars,
    "n x prompts": choices,
    "templates": templates,
    "headers": headers,
}


def raw(url: str, request: Request) -> bytes:
    """The request as bytes; a client library refuses some of the headers."""
    path, body, more = request
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"host: {httpx.URL(url).host}", "content-type: application/json"]
    lines += ["connection: close", f"content-length: {len(content)}", *(f"{name}: {more[name]}" for name in more)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def attack(url: str, name: str, connections: int) -> None:
    """Sends an attack for ever, on so many connections at once. Prints one line when it begins."""
    address, counter = httpx.URL(url), itertools.count()

    def send() -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), 60) as wire:
                wire.sendall(raw(url, ATTACKS[name](next(counter))))
                while wire.recv(1 << 16):
                    pass

    print("begins", flush=True)
    with concurrent.futures.ThreadPoolExecutor(connections) as pool:
        for _ in range(connections):
            pool.submit(send)


@dataclass
class Measured:
    """What the client saw."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between two events of a stream, or until its first event."""
    streams: int = 0
    refused: int = 0
    """Streams that the server did not begin."""
    seconds: float = 0.0

    def add(self, other: Measured) -> None:
        """Counts another turn, too."""
        self.gaps += other.gaps
        self.streams += other.streams
        self.refused += other.refused
        self.seconds += other.seconds

    @property
    def p99(self) -> float:
        """99th percentile of the gaps, in seconds; infinite without any."""
        return statistics.quantiles(self.gaps, n=100)[98] if len(self.gaps) > 1 else float("inf")


def stream(url: str, seconds: float, tokens: int) -> Measured:
    """One short stream after the other for so many seconds. The last one is read to its end."""
    found = Measured()
    body = {"prompt": "Another client", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    begin = time.perf_counter()
    with httpx.Client(base_url=url, timeout=120.0) as client:
        while time.perf_counter() - begin < seconds:
            last = time.perf_counter()
            with client.stream("POST", COMPLETIONS, json=body) as answer:
                if answer.status_code != 200:
                    found.refused += 1
                    time.sleep(0.1)
                    continue
                for line in answer.iter_lines():
                    if line:
                        now = time.perf_counter()
                        found.gaps.append(now - last)
                        last = now
            found.streams += 1
    found.seconds = time.perf_counter() - begin
    return found


@contextlib.contextmanager
def attacked(url: str, name: str, connections: int) -> Iterator[None]:
    """Runs an attack in another process; afterwards, waits until the server has no requests."""
    command = [sys.executable, "-m", "benchmarks.bystander", "--url", url, "--send", name]
    with subprocess.Popen([*command, "--connections", str(connections)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            time.sleep(0.5)
            yield
        finally:
            process.kill()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        stats = httpx.get(f"{url}/status", timeout=60).json().get("stats")
        if stats is None or not (stats["running"] or stats["waiting"]):  # a router has none
            return
        time.sleep(0.2)


def measure(url: str, name: str, options: argparse.Namespace) -> tuple[Measured, Measured]:
    """Control and attack, in alternating turns."""
    control, during = Measured(), Measured()
    for _ in range(options.turns):
        other = attacked(url, "(ordinary)", options.connections)
        with contextlib.nullcontext() if options.control == "alone" else other:
            control.add(stream(url, options.seconds, options.tokens))
        with attacked(url, name, options.connections):
            during.add(stream(url, options.seconds, options.tokens))
    return control, during


def row(name: str, control: Measured, during: Measured) -> str:
    """One line of the table."""
    gap = during.p99 / control.p99
    rates = [each.streams / each.seconds for each in (control, during)]
    streams = rates[1] / rates[0]
    held = "yes" if gap <= MOST_GAP and streams >= FEWEST_STREAMS and not during.refused else "no"
    return (
        f"| {name} | {control.p99 * 1e3:.1f} | {during.p99 * 1e3:.1f} | {gap:.2f} | {rates[0]:.1f} | {rates[1]:.1f} "
        f"| {streams:.2f} | {during.refused} | {held} |"
    )


HEAD = (
    "| attack | control p99 gap, ms | p99 gap, ms | ratio | control streams/s | streams/s | ratio "
    f"| refused | at most {MOST_GAP:g}x and at least {FEWEST_STREAMS:g}x |\n{'|---' * 9}|"
)


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """The URL of a server of our own."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "serving.cli", "serve", "--model", model, "--port", str(port), "--warmup"]
    sizes = ["--max-model-len=512", "--max-num-seqs=8", "--max-num-batched-tokens=64", "--no-log-requests"]
    with subprocess.Popen([*command, *sizes], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                        break
                if process.poll() is not None:
                    sys.exit("the server has ended")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--url", help="of a server or router that runs already")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--control", choices=("alone", "ordinary"), default="alone", help="what runs in the control")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each half of a turn")
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--connections", type=int, default=1, help="of the attacker")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        attack(options.url, options.send, options.connections)
        return
    with contextlib.nullcontext(options.url) if options.url else server(options.model) as url:
        stream(url, 2.0, options.tokens)
        print(HEAD, flush=True)
        for name in options.attacks:
            print(row(name, *measure(url, name, options)), flush=True)


if __name__ == "__main__":
    main()
