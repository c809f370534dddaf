"""A proxy on loopback that makes the model of a server write what a client's test needs.

It adds to each request what the model must write: a call of the client's tool for commands as long as the conversation
has no result of it, and then a text. It takes away a `tool_choice`, which this replaces, and switches reasoning off.
The rest is unchanged.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

RESULT = "said-by-the-tool"
ECHO = "printf '%s-tool %01500d' said-by-the 0"
"""A command with a long result: Cline replaces results only by something shorter."""
TOOL = re.compile(r"(?i)^(bash|shell|shell_command|exec_command|execute_command|run_shell_command|run_commands?)$")
TEXT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")


@dataclass
class Exchange:
    """One request of a client that asks for text. `refused`: the proxy made it too long for the model."""

    path: str
    body: dict[str, Any]
    refused: bool = False
    status: int = 0
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


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
            return [ECHO] if name == "commands" else ["bash", "-lc", ECHO]
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
    """Passes requests on, and adds what the model must write. `exchanges`: what came through since the last `take`.
    Requests that contain all texts of `too_long` get more text than the model can read, and the model calls no more
    tools, as with `ended`."""

    daemon_threads = True
    too_long: tuple[str, ...] = ()
    ended = False

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
            texts = self.server.too_long
            exchange = Exchange(path, body, bool(texts) and all(text in content.decode() for text in texts))
            self.server.exchanges.append(exchange)
            self.server.ended |= exchange.refused
            if exchange.refused and (messages := body.get("input", body.get("messages"))) is not None:
                messages = [*messages, {"role": "user", "content": "too long " * 100_000}]
                body = body | {"input" if "input" in body else "messages": messages}
            asked = json.dumps(body.get("input", body.get("messages")))
            ended = self.server.ended or any(text in asked for text in (RESULT, *texts[-1:]))
            call = call_of(body, ended=ended)
            form = json.dumps(body.get("text") or body.get("response_format") or "")
            chosen = body.get("tool_choice")
            forced = isinstance(chosen, dict) and chosen.get("type") != "auto"
            if "logprobs" not in body and "schema" not in form and not forced:
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
        with contextlib.closing(target), contextlib.suppress(OSError, http.client.HTTPException):  # the client has left
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
            with contextlib.suppress(OSError, http.client.HTTPException):
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
