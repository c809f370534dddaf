"""Real coding agents and libraries against a running server: first turn, a tool's call and result, a second turn, a
picture, a conversation that is too long, and a client that is ended during its request.

Install the clients into folders of their own first (README.md). Start a server, and give its address:

mamba-jax serve --model demo --tool-call-parser qwen3_coder --max-model-len 131072 --allow-long-max-model-len &
python -m benchmarks.clients.real_clients --url http://127.0.0.1:8000 --npm FOLDER --python FOLDER/bin/python ...

The demo model knows nothing, so a proxy makes it write what is needed (`writing_proxy.py`). Each client has a new home.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.clients.client_entries import FIRST, NPM, PYTHON, SECOND, THIRD, Client
from benchmarks.clients.writing_proxy import RESULT, Exchange, Proxy

PASSED = ("yes", "goes on", "-")
TIMED_OUT, FAILED = "(timed out)", "(failed)"


def picture() -> bytes:
    """Returns a PNG file of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(4))), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@contextlib.contextmanager
def home_of(
    client: Client, url: str, path: str, python: str
) -> Iterator[tuple[Path, dict[str, str], Callable[[str], str]]]:
    """Yields a new home with the client's files, the variables for it, none of which are the user's own, and a function
    that replaces the names in braces."""
    with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        here = str(Path(__file__).parent.resolve())
        values = {"url": url, "home": folder, "python": python, "package": client.package, "here": here}
        values |= {"self": sys.executable, "picture": f"data:image/png;base64,{b64encode(picture()).decode()}"}

        def fill(text: str) -> str:
            for name, value in values.items():
                text = text.replace(f"{{{name}}}", value)
            return text

        (home / "dot.png").write_bytes(picture())
        for name, text in client.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(fill(text))
        variables = {
            "PATH": path,
            "HOME": folder,
            "TERM": "dumb",
            "CI": "1",
            "NO_PROXY": "127.0.0.1",
            "LANG": "C.UTF-8",
        }
        yield home, variables | {name: fill(text) for name, text in client.variables.items()}, fill


def run(
    words: list[str], home: Path, variables: dict[str, str], seconds: float, stop: Callable[[], bool] = lambda: False
) -> str:
    """Runs a command of a client to its end, or until `stop`, and returns its output, and whether it failed."""
    end = time.monotonic() + seconds
    process = subprocess.Popen(
        words, cwd=home, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = process.communicate(timeout=0.2)[0]
                return output + (FAILED if process.returncode else "")
            if stop() or time.monotonic() > end:
                return TIMED_OUT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def judged(exchanges: list[Exchange], output: str, *needed: Callable[[Exchange], bool]) -> str:
    """Returns `yes`, or what is missing."""
    if output.endswith((TIMED_OUT, FAILED)):
        return f"no {output[-200:].splitlines()[-1]}"
    failed = next((each for each in exchanges if each.status != 200), None)
    if failed is not None:
        return f"{failed.status} {failed.error}"
    return (
        "yes" if exchanges and all(any(map(need, exchanges)) for need in needed) else f"no ({len(exchanges)} requests)"
    )


def said(text: str) -> Callable[[Exchange], bool]:
    return lambda exchange: text in json.dumps(exchange.body)


def main(arguments: list[str] | None = None) -> int:
    """Runs the clients, and prints a table; 0 if all that ran passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--npm", required=True, help="folder with node_modules of the npm clients")
    parser.add_argument(
        "--python",
        nargs="+",
        type=lambda name: str(Path(name).absolute()),
        default=[],
        help="Pythons, each with some of the Python clients",
    )
    parser.add_argument("--only", help="clients to run, separated by commas")
    parser.add_argument("--seconds", type=float, default=180.0, help="time of one turn")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    proxy, wrong = Proxy(options.url), 0
    path = f"{Path(options.npm).resolve()}/node_modules/.bin:{os.environ['PATH']}"
    titles = "client, version, API, first turn; call; result, second turn, picture, too long, shortened, cancel, cached"
    print(f"| {titles.replace(', ', ' | ')} |\n{'|---' * 10}|", flush=True)
    for client in (*NPM, *PYTHON):
        if options.only and client.name not in options.only.split(","):
            continue
        python = next((each for each in options.python if has(each, client.package)), None) if client.package else ""
        if python is None:
            continue
        with home_of(client, proxy.url, path, python) as (home, variables, fill):
            command = lambda words, *more: run([*map(fill, words)], home, variables, *more)  # noqa: E731
            cells, output = tested(client, proxy, options, command)
        *turns, overflow, shortened, cancel = cells[3:-1]
        if overflow == "says so" and shortened == "yes":
            overflow = shortened
        wrong += any(cell not in PASSED for cell in (*turns, overflow, shortened, cancel))
        print(f"| {' | '.join(cells)} |", flush=True)
        if options.verbose:
            print("\n".join(text[-1500:] for text in output), flush=True)
    return 1 if wrong else 0


def tested(
    client: Client, proxy: Proxy, options: argparse.Namespace, command: Callable[..., str]
) -> tuple[list[str], list[str]]:
    """Returns a client's row of the table, and what its commands wrote. `command` runs one for a number of seconds."""
    output = list[str]()

    def start(words: list[str], *more: Callable[[], bool]) -> list[Exchange]:
        output.append(command(words, options.seconds, *more))
        return proxy.take()

    start(client.version)
    version = re.search(r"\d+\.\d+[\w.]*", output.pop())
    seen = RESULT if client.tools else FIRST if client.turns else ""
    first = last = start(client.first)
    row = [judged(first, output[-1], said(seen)), "-", "-", "-", "-"]
    if client.second:
        last = start(client.second)
        row[1] = judged(last, output[-1], said(SECOND), said(seen))
    elif client.turns:  # the first command runs both turns
        row[1] = judged(first, output[-1], said(SECOND))
    again = [word.replace(SECOND, THIRD) for word in client.overflow or client.second or client.first]
    newest = next((text for text in (THIRD, FIRST) if any(text in word for word in again)), "")
    if newest and client.turns:
        older = FIRST if client.package else seen
        proxy.too_long = (newest, older) if client.overflow else (older, newest)
        row[3] = refused(start(again), output[-1], newest)
        proxy.too_long, proxy.ended = (), False
    if client.shortened:
        proxy.ended = True  # or each result would be a reason to shorten it again
        row[4] = judged(start(client.shortened), output[-1], lambda each: said(THIRD)(each) and not said(seen)(each))
        proxy.ended = False
    if client.picture:
        row[2] = judged(start(client.picture), output[-1], said("iVBORw0KGgo"))  # how each PNG file begins
    row.append(cancelled(lambda: start(client.first, lambda: bool(proxy.exchanges)), options.url))
    api = ", ".join(sorted({each.path for each in first})) or "-"
    return [client.name, version[0] if version else "?", api, *row, cached(last, seen)], output


def has(python: str, package: str) -> bool:
    """Returns whether a Python has a package."""
    words = [python, "-c", f"import importlib.metadata as m; m.version({package!r})"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def refused(exchanges: list[Exchange], output: str, newest: str) -> str:
    """Returns what a client does whose conversation has become too long: it `goes on` with the `newest` message after
    it has shortened it, it `shortens it` but keeps what is too long, or `says so`."""
    first = next((i for i, each in enumerate(exchanges) if each.refused), None)
    if first is None:
        return f"no ({len(exchanges)} requests)"
    later = [each for each in exchanges[first:] if each.status == 200 and not each.refused]
    if any(said(newest)(each) and (each.body.get("tools") or not exchanges[first].body.get("tools")) for each in later):
        return f"no ({len(exchanges)} requests)" if exchanges[-1].refused else "goes on"
    return "shortens it" if later else "no (timed out)" if output == TIMED_OUT else "says so"


def cached(exchanges: list[Exchange], seen: str) -> str:
    """Returns the cached and all prompt tokens of the conversation's longest request; clients also ask for titles."""
    counts = [(0, 0)]
    for each in exchanges:
        if said(SECOND)(each) and said(seen)(each):
            usage = each.usage
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            found = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
            whole = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            if "cache_read_input_tokens" in usage:
                whole += found + usage.get("cache_creation_input_tokens", 0)
            counts.append((whole, found))
    return f"{max(counts)[1]} of {max(counts)[0]}"


def cancelled(start: Callable[[], list[Exchange]], url: str) -> str:
    """Ends a client during its first request. The server must be idle soon."""
    if not start():
        return "no (0 requests)"
    target = urlsplit(url)
    for _ in range(60):
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/load")
            if json.loads(connection.getresponse().read())["server_load"] == 0:
                return "yes"
        time.sleep(0.5)
    return "no (the server goes on)"


if __name__ == "__main__":
    sys.exit(main())
