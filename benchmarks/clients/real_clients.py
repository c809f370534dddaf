"""Real coding agents and libraries against a running server: first turn, a tool's call and result, a second turn.

Install the clients into folders of their own first (README.md). Start a server, and give its address:

mamba-jax serve --model demo --tool-call-parser qwen3_coder --max-model-len 131072 --allow-long-max-model-len &
python -m benchmarks.clients.real_clients --url http://127.0.0.1:8000 --npm FOLDER --python FOLDER/bin/python

The demo model knows nothing, so a proxy on loopback adds to each request what the model must write: a call of the
client's tool for commands as long as the conversation has no result of it, and then a text. It takes away a
`tool_choice`, which this replaces, and switches reasoning off. The rest is unchanged. Each client has a new home.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ECHO = "echo said-by-the-tool"
RESULT = "said-by-the-tool"
FIRST, SECOND = "Say hello with a command.", "And what did it say?"
TOOL = re.compile(r"(?i)^(bash|shell|shell_command|exec_command|run_shell_command|run_command)$")
TEXT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass
class Exchange:
    """One request of a client that asks for text."""

    path: str
    body: dict[str, Any]
    status: int = 0
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


def picture() -> bytes:
    """Returns a PNG file of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(4))), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def offered(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the parameters of the functions in a request to any of the APIs, by name."""
    found = {}
    for tool in body.get("tools") or ():
        each = tool.get("function") or tool
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            found[each["name"]] = each.get("parameters") or each.get("input_schema") or {}
    return found


def value_for(name: str, schema: Any) -> Any:
    """Returns an argument of the tool for commands."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and schema.get("enum"):
        return schema["enum"][0]
    match kind:
        case "array":
            return ["bash", "-lc", ECHO]
        case "number" | "integer":
            return 5
        case "boolean":
            return False
    return ECHO if name in ("command", "cmd", "script", "code") else "greet"


def call_of(body: dict[str, Any], *, ended: bool) -> str | None:
    """Returns the text of a call of the client's tool for commands, or when the turn has `ended` of its tool for the
    answer, as `qwen3_coder` writes it."""
    for name, schema in offered(body).items():
        if (name == "final_answer") if ended else TOOL.match(name):
            properties = schema.get("properties") or {}
            required = [key for key in properties if key in (schema.get("required") or properties)]
            values = {key: value_for(key, properties[key]) for key in required}
            written = "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                for key, value in values.items()
            )
            return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"
    return None


class Proxy(ThreadingHTTPServer):
    """Passes requests on, and adds what the model must write. `exchanges`: what came through since the last `take`."""

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.exchanges = urlsplit(url), list[Exchange]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self) -> list[Exchange]:
        """Returns the exchanges since the last call."""
        taken, self.exchanges = self.exchanges, []
        return taken


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        self._pass(None, None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        path, exchange = urlsplit(self.path).path, None
        if path in TEXT_PATHS:
            body = json.loads(content)
            exchange = Exchange(path, body)
            self.server.exchanges.append(exchange)
            call = call_of(body, ended=RESULT in json.dumps(body.get("input", body.get("messages"))))
            form = json.dumps(body.get("text") or body.get("response_format") or "")
            if "schema" not in form and not isinstance(body.get("tool_choice"), dict):
                body = {name: value for name, value in body.items() if name != "tool_choice"}
                body["structured_outputs"] = {"choice": [call or "It said hello."]}
            body["chat_template_kwargs"] = {"enable_thinking": False}
            content = json.dumps(body).encode()
        self._pass(content, exchange)

    def _pass(self, content: bytes | None, exchange: Exchange | None) -> None:
        target = http.client.HTTPConnection(self.server.target.hostname or "", self.server.target.port, timeout=600)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")
        }
        with contextlib.closing(target):
            target.request(self.command, self.path, content, headers | {"accept-encoding": "identity"})
            threading.Thread(target=self._watch, args=(target.sock,), daemon=True).start()
            answer = target.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            if exchange is not None:
                exchange.status = answer.status
            seen, self.close_connection = b"", True
            with contextlib.suppress(OSError, http.client.HTTPException):  # the client has left
                while piece := answer.read1(65536):
                    seen += piece
                    self.wfile.write(piece)
                    self.wfile.flush()
        if exchange is not None:
            exchange.error = "" if answer.status == 200 else seen[:300].decode(errors="replace")
            usages = re.findall(rb'"usage":(\{(?:[^{}]|\{[^{}]*\})*\})', seen)
            exchange.usage = json.loads(usages[-1]) if usages else {}

    def _watch(self, target: socket.socket) -> None:
        """Closes the connection to the server when the client leaves."""
        with contextlib.suppress(OSError, ValueError):
            if self.connection.recv(1, socket.MSG_PEEK) == b"":
                target.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class Client:
    """One client: its commands, and what it needs in its home. `{url}` is the proxy's, `{home}` the home."""

    name: str
    version: list[str]
    first: list[str]
    second: list[str] | None = None
    picture: list[str] | None = None
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
CLAUDE = ["claude", "-p", "--model", "demo", "--allowedTools", "Bash,Read"]
NPM = (
    Client(
        "Codex", ["codex", "--version"], [*CODEX, FIRST],
        ["codex", "exec", "resume", "--last", "--skip-git-repo-check", SECOND],
        [*CODEX, "-i", "{home}/dot.png", "--", "What is in the picture?"],
        {".codex/config.toml": 'model = "demo"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
         'base_url = "{url}/v1"\nwire_api = "responses"\n'},
    ),
    Client(
        "Claude Code", ["claude", "--version"], [*CLAUDE, "--", FIRST], [*CLAUDE, "--continue", SECOND],
        [*CLAUDE, "--", "Look at @{home}/dot.png"],
        variables={"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "-", "ANTHROPIC_SMALL_FAST_MODEL": "demo",
                   "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    Client(
        "OpenCode", ["opencode", "--version"], ["opencode", "run", "-m", "local/demo", FIRST],
        ["opencode", "run", "--continue", "-m", "local/demo", SECOND],
        ["opencode", "run", "-m", "local/demo", "What is in the picture?", "-f", "{home}/dot.png"],
        {".config/opencode/opencode.json": json.dumps({
            "provider": {"local": {
                "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{url}/v1", "apiKey": "-"},
                "models": {"demo": {"name": "demo", "attachment": True,
                                    "modalities": {"input": ["text", "image"], "output": ["text"]}}}}},
            "permission": {"bash": "allow"}, "autoupdate": False})},
        {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    Client(
        "Qwen Code", ["qwen", "--version"], ["qwen", "--yolo", "--auth-type", "openai", "-p", FIRST],
        ["qwen", "--yolo", "--auth-type", "openai", "--continue", "-p", SECOND],
        ["qwen", "--yolo", "--auth-type", "openai", "-p", "Look at @dot.png"],
        variables={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "-", "OPENAI_MODEL": "demo"},
    ),
    Client(
        "pi", ["pi", "--version"], ["pi", "--provider", "local", "--model", "demo", "-p", FIRST],
        ["pi", "--provider", "local", "--model", "demo", "--continue", "-p", SECOND],
        ["pi", "--provider", "local", "--model", "demo", "-p", "@{home}/dot.png", "What is in the picture?"],
        {".pi/agent/models.json": json.dumps({"providers": {"local": {
            "baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "-",
            "models": [{"id": "demo", "input": ["text", "image"]}]}}})},
    ),
)  # fmt: skip


@contextlib.contextmanager
def home_of(client: Client, url: str, path: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields a new home with the client's files, and the variables for it: nothing of the user's own."""
    with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        fill = lambda text: text.replace("{url}", url).replace("{home}", folder)  # noqa: E731
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
        yield home, variables | {name: fill(text) for name, text in client.variables.items()}


def run(words: list[str], home: Path, variables: dict[str, str], url: str, seconds: float) -> str:
    """Runs a command of a client to its end, and returns its output."""
    filled = [word.replace("{home}", str(home)).replace("{url}", url) for word in words]
    process = subprocess.Popen(
        filled, cwd=home, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return "(timed out)"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def judged(exchanges: list[Exchange], *needed: Callable[[Exchange], bool]) -> str:
    """Returns `yes`, or what is missing."""
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
    parser.add_argument("--python", help="a Python with the Python clients")
    parser.add_argument("--only", help="clients to run, separated by commas")
    parser.add_argument("--seconds", type=float, default=180.0, help="time of one turn")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    proxy, wrong = Proxy(options.url), 0
    path = f"{Path(options.npm).resolve()}/node_modules/.bin:{os.environ['PATH']}"
    print("| client | version | API | first turn, call, result | second turn | picture | cancel | cached in turn 2 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for client in (*NPM, *python_clients(options.python)):
        if options.only and client.name not in options.only.split(","):
            continue
        with home_of(client, proxy.url, path) as (home, variables):
            start = lambda words, seconds=options.seconds: run(words, home, variables, proxy.url, seconds)  # noqa: E731
            found = re.search(r"\d+\.\d+[\w.]*", start(client.version, 60.0))
            proxy.take()
            output = [start(client.first)]
            first = proxy.take()
            # A library's script runs both turns.
            row = [judged(first, said(RESULT)), "-" if client.second else judged(first, said(SECOND)), "-", "-"]
            used = cached(first)
            if client.second:
                output.append(start(client.second))
                second = proxy.take()
                row[1] = judged(second, said(SECOND), said(RESULT))
                used = cached(second)
            if client.picture:
                output.append(start(client.picture))
                row[2] = judged(proxy.take())
            row[3] = cancelled(lambda: start(client.first, 1.5), options.url)  # noqa: B023
            proxy.take()
            api = ", ".join(sorted({each.path for each in first})) or "-"
            wrong += any(cell not in ("yes", "-") for cell in row)
            print(f"| {client.name} | {found[0] if found else '?'} | {api} | {' | '.join(row)} | {used} |", flush=True)
            if options.verbose:
                print("\n".join(text[-1500:] for text in output), flush=True)
    return 1 if wrong else 0


def cached(exchanges: list[Exchange]) -> str:
    """Returns the cached and all prompt tokens of the conversation's longest request; clients also ask for titles."""
    counts = [(0, 0)]
    for each in exchanges:
        if said(SECOND)(each) and said(RESULT)(each):
            usage = each.usage
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            found = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
            whole = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            if "cache_read_input_tokens" in usage:
                whole += found + usage.get("cache_creation_input_tokens", 0)
            counts.append((whole, found))
    return f"{max(counts)[1]} of {max(counts)[0]}"


def cancelled(start: Callable[[], str], url: str) -> str:
    """Ends a client during its turn. The server must be idle soon."""
    start()
    target = urlsplit(url)
    for _ in range(60):
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/load")
            if json.loads(connection.getresponse().read())["server_load"] == 0:
                return "yes"
        time.sleep(0.5)
    return "no (the server goes on)"


def python_clients(python: str | None) -> Iterator[Client]:
    """Yields the libraries, each run by `libraries.py`, which makes both turns."""
    if python is None:
        return
    script = str(Path(__file__).with_name("libraries.py"))
    for name, package in (
        ("openai-agents", "openai-agents"), ("llm", "llm"), ("instructor", "instructor"), ("smolagents", "smolagents"),
        ("LangGraph", "langgraph"), ("pydantic-ai", "pydantic-ai-slim"),
    ):  # fmt: skip
        shown = f"import importlib.metadata as m; print(m.version({package!r}))"
        yield Client(name, [python, "-c", shown], [python, script, name, "{url}"])


if __name__ == "__main__":
    sys.exit(main())
