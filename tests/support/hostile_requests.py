"""Requests that mean harm, and what must be true of the server while each of them runs.

One list for everything that stands on a network: the server, and the router in front of workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

MOST_SECONDS_BETWEEN = 1.0 if "CI" in os.environ else 0.25
"""Between two events of a bystander's stream, the first one's wait included, beyond what held up the bystander itself.
Machines of a CI share their cores."""
_TRIES = 3
"""A pause that a request causes is there every time; one by something else on the machine is not."""
MOST_BYTES = 300 << 20
"""By which a process's resident memory may grow."""
MIB = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Answers = set[int]


@dataclass(frozen=True)
class Hostile:
    """One client's doing. `send` gives the statuses that came back, 0 for a connection that was cut off."""

    name: str
    send: Callable[[str], Answers]
    allowed: frozenset[int]
    """Statuses that are right."""


def post(path: str, *bodies: object) -> Callable[[str], Answers]:
    """Posts each body, JSON or bytes."""

    def send(url: str) -> Answers:
        found = set()
        for body in bodies:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = httpx.post(
                url + path, content=content, headers={"content-type": "application/json"}, timeout=120.0
            )
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"], body
                whole = error["code"] == "too_deeply_nested"  # the body has not been parsed
                if answer.status_code == 400 and isinstance(body, dict) and not whole:
                    assert error["param"], (error, str(body)[:200])
            found.add(answer.status_code)
        return found

    return send


def chat(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields


def completion(**fields: object) -> dict[str, object]:
    return {"prompt": "x", "max_tokens": 1} | fields


def structured(**form: object) -> dict[str, object]:
    return completion(structured_outputs=form)


def raw(text: bytes, count: int = 1, *, drip: bool = False, seconds: float = 30.0) -> Callable[[str], Answers]:
    """Opens `count` connections, writes `text` on each (`drip`: and one more byte at a time, for ever), and waits for
    all of them to be answered or cut off."""

    def send(url: str) -> Answers:
        address = urlsplit(url)
        wires = []
        for _ in range(count):
            wire = socket.create_connection((address.hostname, address.port), timeout=seconds)
            with contextlib.suppress(OSError):
                wire.sendall(text)
            wires.append(wire)
        end, found = time.monotonic() + seconds, set()
        for wire in wires:
            answer = b""
            while time.monotonic() < end:
                wire.settimeout(0.2 if drip else seconds)
                try:
                    if drip:
                        wire.sendall(b"x")
                    piece = wire.recv(65536)
                except TimeoutError:
                    continue
                except OSError:
                    break
                if not piece:
                    break
                answer += piece
            else:
                raise AssertionError("a connection that says nothing is still open")
            wire.close()
            found.add(int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0)
        return found

    return send


def head(path: str, length: int) -> bytes:
    """Of a request whose body has `length` bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def endless_body(url: str) -> Answers:
    """A body without a stated length that does not end."""

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(150):
            yield b"x" * MIB

    try:
        answer = httpx.post(
            url + COMPLETIONS, content=pieces(), headers={"content-type": "application/json"}, timeout=60.0
        )
    except httpx.TransportError:  # cut off while it still wrote
        return {0}
    return {answer.status_code}


NO_TEMPLATE = frozenset({400})
REFUSED = frozenset({400, 413})
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PARAMETERS = ("messages", "tools", "documents", "add_special_tokens", "add_generation_prompt", "self", "fits")


def deep(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NESTED = "[" * 50_000 + "]" * 50_000


def tool(**parameters: object) -> dict[str, object]:
    """A function with these parameters, for a call that is forced."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return chat(tools=tools, tool_choice="required")


def call(arguments: str, name: str = "f") -> dict[str, object]:
    """A conversation in which the assistant has called a function."""
    made = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [made]}])


def written(*texts: str) -> list[dict[str, object]]:
    """Requests to whose answers the model is held: it writes these texts."""
    return [chat(tools=[TOOL], structured_outputs={"choice": [text]}, max_tokens=400) for text in texts]


def as_message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields


def with_headers(*headers: tuple[bytes, bytes]) -> Callable[[str], Answers]:
    """Posts a completion once with each header, as it is."""

    def send(url: str) -> Answers:
        content = json.dumps(completion()).encode()
        found = set()
        for name, value in headers:
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            )
            head += name + b": " + value + b"\r\ncontent-length: %d\r\n\r\n" % len(content)
            found |= raw(head + content)(url)
        return found

    return send


FORWARDED = (b"x-request-id", b"traceparent", b"tracestate", b"authorization", b"x-api-key")
HOSTILE = [
    Hostile(
        "headers that end with white space",
        with_headers(*((name, b"abc" + end) for name in FORWARDED for end in (b" ", b"\t", b" \t "))),
        frozenset({200}),
    ),
    Hostile(
        "headers with bytes above 0x7f",
        with_headers(*((name, value) for name in FORWARDED for value in (b"caf\xe9", b"\xff\xfe"))),
        frozenset({200, 400}),
    ),
    Hostile(
        "heads at and above the limit",
        with_headers(*((b"x-api-key", b"k" * size) for size in (9000, 60_000, 65_200, 68_004, 200_000))),
        frozenset({0, 200, 431}),
    ),
    Hostile(
        "calls of wrong types",
        post(
            CHAT,
            *(
                chat(messages=[{"role": "assistant", "tool_calls": calls}])
                for calls in ([5], 5, "x", [None], [[]], True, [{"function": 5}], [{}])
            ),
        ),
        frozenset({200, 400}),
    ),
    Hostile(
        "arguments that are no JSON",
        post(CHAT, *map(call, (NESTED, r'{"a": "\ud800"}', "NaN", '{"a": Infinity}', "5", "{"))),
        frozenset({200, 400}),
    ),
    Hostile(
        "calls that a model writes wrongly",
        post(
            CHAT,
            *written(
                r'<tool_call>{"name": "\q", "arguments": {}}</tool_call>',
                r'<tool_call>{"name": "\ud800", "arguments": {"a": "\udfff"}}</tool_call>',
                r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "f"}</tool_call>',
                '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
                "<tool_call><function=f><parameter=a>Infinity</parameter></function></tool_call>",
                r'<tool_call><function=f><parameter=a>"\ud800"</parameter></function></tool_call>',
            ),
        ),
        frozenset({200, 400}),
    ),
    Hostile(
        "values of wrong types to responses",
        post(
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
            {"input": [{"role": "user", "content": 5}]},
            {"input": [{"role": "user", "content": True}]},
            {"input": [{"type": "reasoning", "content": 5}]},
            {"input": [{"type": "function_call", "call_id": "c", "name": 5, "arguments": 5}]},
        ),
        frozenset({200, 400}),
    ),
    Hostile(
        "schemas of wrong types for a forced call",
        post(
            CHAT,
            tool(type="object", required=5),
            tool(type="object", properties=5),
            tool(type="object", properties={"a": 5}),
            tool(type="object", properties={"a": {"type": "string", "enum": 5}}),
        ),
        frozenset({400}),
    ),
    Hostile(
        "values that are nested deeply",
        post(
            "/v1/responses",
            {
                "input": "x",
                "max_output_tokens": 1,
                "tools": [{"type": "function", "name": "f", "parameters": deep(400)}],
            },
        ),
        frozenset({400}),
    ),
    Hostile(
        "messages that are nested deeply",
        post(
            "/v1/messages",
            as_message(
                messages=[
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": deep(900)}]}
                ]
            ),
            as_message(tools=[{"name": "f", "input_schema": deep(400)}]),
        ),
        frozenset({400}),
    ),
    Hostile("a template of the client's", post(CHAT, chat(chat_template_kwargs={"chat_template": LOOPS})), NO_TEMPLATE),
    Hostile(
        "a template that fills memory",
        post(CHAT, chat(chat_template_kwargs={"chat_template": "{{ 'a' * 200000000 }}"})),
        NO_TEMPLATE,
    ),
    Hostile(
        "a template to tokenise with",
        post(
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": LOOPS}},
        ),
        NO_TEMPLATE,
    ),
    Hostile(
        "variables with names of parameters",
        post(CHAT, *(chat(chat_template_kwargs={name: [1]}) for name in PARAMETERS)),
        NO_TEMPLATE,
    ),
    Hostile(
        "a grammar that does not come to an end",
        post(COMPLETIONS, structured(json={"type": "integer", "multipleOf": 123456789})),
        frozenset({400}),
    ),
    Hostile(
        "five thousand patterns",
        post(
            COMPLETIONS,
            structured(json={"type": "object", "patternProperties": {f"^x{i}_.*": {} for i in range(5000)}}),
        ),
        frozenset({400}),
    ),
    Hostile(
        "grammars that go in circles",
        post(COMPLETIONS, structured(grammar="start: a\na: a"), structured(json={"$ref": "#"})),
        frozenset({400}),
    ),
    Hostile(
        "a grammar that becomes too complex on its way",
        post(COMPLETIONS, structured(grammar='start: "abc" ' + '("a" | "b" | "ab")? ' * 300) | {"max_tokens": 20}),
        frozenset({400}),
    ),
    Hostile("a deep schema", post(COMPLETIONS, structured(json=deep(300))), frozenset({200, 400})),
    Hostile("a prompt of 2 MB", post(COMPLETIONS, completion(prompt="word and so on, " * (MIB // 8))), REFUSED),
    Hostile("a prompt of 7.9 MB", post(COMPLETIONS, completion(prompt="x7 " * (79 * MIB // 30))), REFUSED),
    Hostile("a role of 7.9 MB", post(CHAT, chat(messages=[{"role": "x " * (39 * MIB // 10)}])), REFUSED),
    Hostile("forty thousand messages", post(CHAT, chat(messages=[{"role": "u", "content": ""}] * 40_000)), REFUSED),
    Hostile("many long prompts", post(COMPLETIONS, completion(prompt=["some text " * 3000] * 250)), REFUSED),
    Hostile("7.9 MB to count", post("/tokenize", {"prompt": "text, " * (79 * MIB // 60)}), frozenset({200, 400})),
    Hostile("a million empty lists", post(COMPLETIONS, b'{"prompt": [' + b"[]," * MIB + b"[]]}"), REFUSED),
    Hostile("a million empty messages", post(CHAT, b'{"messages": [' + b"{}," * MIB + b"{}]}"), REFUSED),
    Hostile("four million numbers", post(COMPLETIONS, b'{"prompt": [' + b"1," * (4 * MIB - 100) + b"1]}"), REFUSED),
    Hostile("nested lists", post(COMPLETIONS, b'{"prompt": ' + b"[" * MIB), REFUSED),
    Hostile("a long number", post(COMPLETIONS, b'{"prompt": "x", "seed": ' + b"1" * 4 * MIB + b"}"), REFUSED),
    Hostile("not a number", post(COMPLETIONS, b'{"prompt": "x", "temperature": NaN}'), REFUSED),
    Hostile("half a character", post(COMPLETIONS, b'{"prompt": "\\ud800"}', b'{"user": "\\udfff"}'), REFUSED),
    Hostile(
        "numbers at the edges",
        post(
            COMPLETIONS,
            completion(top_k=2**31 - 1),
            completion(min_tokens=2**31 - 1),
            completion(seed=-(2**63)),
            completion(n=129),
            completion(logprobs=21),
            completion(stop=["x"] * 65),
            completion(logit_bias={str(i): 1 for i in range(5000)}),
            completion(stop_token_ids=list(range(5000))),
        ),
        frozenset({200, 400}),
    ),
    Hostile("a body that does not end", endless_body, frozenset({0, 413})),
    Hostile("a body that does not come", raw(head(COMPLETIONS, 1000), 20, drip=True), frozenset({0, 408})),
    Hostile("half-open connections", raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", 500), frozenset({0})),
    Hostile("connections that say nothing", raw(b"", 500), frozenset({0})),
    Hostile("a head that does not end", raw(b"GET / HTTP/1.1\r\nx: ", drip=True), frozenset({0})),
    Hostile("a head of megabytes", raw(b"GET / HTTP/1.1\r\nx: " + b"y" * 4 * MIB), frozenset({0, 400})),
    Hostile("no HTTP", raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 50), frozenset({0, 400})),
]


class Bystander:
    """Another client, with one short stream after the other, and a probe between them. Used as a context."""

    def __init__(self, url: str, pids: list[int]) -> None:
        self._url, self._pids = url, pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None
        self._clock = threading.Thread(target=self._watch_the_clock)
        self._held_up: list[tuple[float, float]] = []
        """When this process came late to a moment of its own, and by how many seconds."""
        self.streams = 0
        self.longest = 0.0
        """Seconds between two events, or without an answer to a probe."""
        self.grown = 0
        """Bytes by which a process grew at its largest."""

    def __enter__(self) -> Bystander:
        self._before = {pid: _memory(pid, "VmRSS") for pid in self._pids}
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted anew
        self._clock.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._clock.join()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a bystander's stream does not end"
        if self._failure is not None:
            raise self._failure
        self.grown = max(_memory(pid, "VmHWM") - self._before[pid] for pid in self._pids)

    def _run(self) -> None:
        body = {"prompt": "Another client", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            with httpx.Client(base_url=self._url, timeout=60.0) as client:
                while not (self._stop.is_set() and self.streams):
                    last = time.monotonic()
                    with client.stream("POST", COMPLETIONS, json=body) as answer:
                        assert answer.status_code == 200, answer.read()
                        for line in answer.iter_lines():
                            assert '"error"' not in line, line
                            last = self._waited_since(last)
                    assert client.get("/health").status_code == 200
                    self._waited_since(last)
                    self.streams += 1
        except BaseException as error:
            self._failure = error

    def _waited_since(self, last: float) -> float:
        """Notes the pause that ends now, less what this process was held up in it; returns what the time is."""
        now = time.monotonic()
        own = sum(late for at, late in list(self._held_up) if last <= at <= now)
        self.longest = max(self.longest, now - last - own)
        return now

    def _watch_the_clock(self) -> None:
        while not self._stop.is_set():
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            late = time.monotonic() - due
            if late > 0.005:
                self._held_up.append((due + late, late))


def _memory(pid: int, name: str) -> int:
    """A line of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def check_bystanders_are_unaffected(hostile: Hostile, url: str, pids: list[int]) -> None:
    """Sends it while a bystander streams: it ends as expected, and affects neither the bystander nor memory."""
    pauses = []
    for _ in range(_TRIES):
        with Bystander(url, pids) as bystander:
            answers = hostile.send(url)
        assert answers <= hostile.allowed, answers
        assert bystander.grown < MOST_BYTES, f"{bystander.grown / MIB:.0f} MiB more"
        pauses.append(bystander.longest)
        if bystander.longest < MOST_SECONDS_BETWEEN:
            return
    raise AssertionError(f"every time there were seconds without an event: {', '.join(f'{s:.3f}' for s in pauses)}")
