"""Requests that mean harm, and what must be true of the server while each of them runs.

One list for everything that stands on a network: the server, and the router in front of workers.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from tests.support.servers.refused_values import BODY, REFUSED, deep

MIB = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}

Answers = set[int]


@dataclass(frozen=True)
class Hostile:
    """One client's doing. `send` gives the statuses that came back, 0 for a connection that was cut off; `allowed` are
    those that are right."""

    name: str
    allowed: Answers
    send: Callable[[str], Answers]


def posted(name: str, allowed: Answers, path: str, *bodies: object, at_once: int = 1) -> Hostile:
    """Posts each body, JSON or bytes."""
    contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]

    def send(url: str) -> Answers:
        found = set()
        with httpx.Client(headers=JSON, timeout=120.0) as client, ThreadPoolExecutor(at_once) as threads:
            answers = [*threads.map(lambda content: client.post(url + path, content=content), contents)]
        for body, answer in zip(bodies, answers, strict=True):
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"], body
                whole = error["code"] == "too_deeply_nested"  # the body has not been parsed
                if answer.status_code == 400 and isinstance(body, dict) and not whole:
                    assert error["param"], (error, str(body)[:200])
            found.add(answer.status_code)
        return found

    return Hostile(name, allowed, send)


def chat(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields


def completion(**fields: object) -> dict[str, object]:
    return {"prompt": "x", "max_tokens": 1} | fields


def structured(**form: object) -> dict[str, object]:
    return completion(structured_outputs=form)


def raw(
    *texts: bytes, count: int = 1, drip: bool = False, half: bool = False, seconds: float = 30.0
) -> Callable[[str], Answers]:
    """Opens `count` connections for each text, writes it (`drip`: and one more byte at a time, for ever; `half`: and
    closes this direction), and waits for all of them to be answered or cut off."""

    def send(url: str) -> Answers:
        address = urlsplit(url)
        wires = []
        for text in texts * count:
            wire = socket.create_connection((address.hostname, address.port), timeout=seconds)
            with contextlib.suppress(OSError):
                wire.sendall(text)
                if half:
                    wire.shutdown(socket.SHUT_WR)
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
        answer = httpx.post(url + COMPLETIONS, content=pieces(), headers=JSON, timeout=60.0)
    except httpx.TransportError:  # cut off while it still wrote
        return {0}
    return {answer.status_code}


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PARAMETERS = ("messages", "tools", "documents", "add_special_tokens", "add_generation_prompt", "self", "fits")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARTS = [*({"type": "thinking", "thinking": str(i)} for i in range(4000)), *["a"] * 12_000]
NESTED = "[" * 50_000 + "]" * 50_000


def call(arguments: str, name: str = "f") -> dict[str, object]:
    """A conversation in which the assistant has called a function."""
    made = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [made]}])


def written(*texts: str) -> list[dict[str, object]]:
    """Requests to whose answers the model is held: it writes these texts."""
    return [chat(tools=[TOOL], structured_outputs={"choice": [text]}, max_tokens=400) for text in texts]


CONTENT = json.dumps(completion()).encode()


def framed(*headers: bytes, body: bytes = CONTENT) -> bytes:
    """A request with these headers, after which the server is to close the connection."""
    lines = b"POST /v1/completions HTTP/1.1", b"host: x", b"connection: close", b"content-type: application/json"
    return b"\r\n".join((*lines, *headers, b"", body))


LENGTH = b"content-length: %d" % len(CONTENT)


def with_headers(*headers: tuple[bytes, bytes]) -> Callable[[str], Answers]:
    """Posts a completion with each header, as it is. One after the other: many at once hold up any other client."""
    return lambda url: set().union(*(raw(framed(name + b": " + value, LENGTH))(url) for name, value in headers))


NUM_ODD = 14
"""The first of the list are odd, not large: `tests/serving/api/test_odd_requests.py` has them by default."""
FORWARDED = (b"x-request-id", b"traceparent", b"tracestate", b"authorization", b"x-api-key")
HOSTILE = [
    Hostile("headers that end with white space", {200},
        with_headers(*((name, b"abc" + end) for name in FORWARDED for end in (b" ", b"\t", b" \t ")))),
    Hostile("headers with bytes above 0x7f", {200, 400},
        with_headers(*((name, value) for name in FORWARDED for value in (b"caf\xe9", b"\xff\xfe")))),
    Hostile("heads at and above the limit", {0, 200, 431},
        with_headers(*((b"x-api-key", b"k" * size) for size in (9000, 60_000, 65_200, 68_004, 200_000)))),
    posted("calls of wrong types", {200, 400}, CHAT,
        *(chat(messages=[{"role": "assistant", "tool_calls": calls}])
          for calls in ([5], 5, "x", [None], [[]], True, [{"function": 5}], [{}]))),
    posted("arguments that are no JSON", {200, 400}, CHAT,
        *map(call, (NESTED, r'{"a": "\ud800"}', "NaN", '{"a": Infinity}', "5", "{"))),
    posted("calls that a model writes wrongly", {200, 400}, CHAT,
        *written(
            r'<tool_call>{"name": "\q", "arguments": {}}</tool_call>',
            r'<tool_call>{"name": "\ud800", "arguments": {"a": "\udfff"}}</tool_call>',
            r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "f"}</tool_call>',
            '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
            "<tool_call><function=f><parameter=a>Infinity</parameter></function></tool_call>",
            r'<tool_call><function=f><parameter=a>"\ud800"</parameter></function></tool_call>'), at_once=6),
    *(posted(f"values that {path} refuses", {400}, path,
             *(BODY[at] | fields for at, fields, *_ in REFUSED if at == path)) for path in BODY),
    posted("conversations that were not stored", {400, 404}, "/v1/responses",
        *({"input": "x", "previous_response_id": name} for name in ("resp_0", "x" * 100_000))),
    Hostile("lengths of bodies that contradict each other", {0, 400, 413}, raw(
        framed(LENGTH, b"content-length: 3"), framed(LENGTH, b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
        framed(b"content-length: -1"), framed(b"content-length: 99999999999999999999"),
        framed(b"transfer-encoding: chunked", body=b"fffffffffffffffff\r\n"))),
    Hostile("connections that are half closed", {0, 200, 400, 408},
        raw(framed(LENGTH), framed(b"content-length: 1000"), b"GET /ping HTTP/1.1\r\nhost: x\r\n", half=True)),
    posted("messages that are nested deeply", {400}, "/v1/messages",
        chat(messages=[
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": deep(900)}]}]),
        chat(tools=[{"name": "f", "input_schema": deep(400)}])),
    posted("a template of the client's", {400}, CHAT, chat(chat_template_kwargs={"chat_template": LOOPS})),
    posted("a template to tokenize with", {400}, "/tokenize",
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": LOOPS}}),
    posted("variables with names of parameters", {400}, CHAT,
        *(chat(chat_template_kwargs={name: [1]}) for name in PARAMETERS)),
    posted("a grammar that does not come to an end", {400}, COMPLETIONS,
        structured(json={"type": "integer", "multipleOf": 123456789})),
    posted("five thousand patterns", {400}, COMPLETIONS,
        structured(json={"type": "object", "patternProperties": {f"^x{i}_.*": {} for i in range(5000)}})),
    posted("grammars that go in circles", {400}, COMPLETIONS,
        structured(grammar="start: a\na: a"), structured(json={"$ref": "#"})),
    posted("a grammar that becomes too complex on its way", {400}, COMPLETIONS,
        structured(grammar='start: "abc" ' + '("a" | "b" | "ab")? ' * 300) | {"max_tokens": 20}),
    posted("a deep schema", {200, 400}, COMPLETIONS, structured(json=deep(300))),
    posted("a prompt of 2 MB", {400, 413}, COMPLETIONS, completion(prompt="word and so on, " * (MIB // 8))),
    posted("a prompt of 7.9 MB", {400, 413}, COMPLETIONS, completion(prompt="x7 " * (79 * MIB // 30))),
    posted("a role of 7.9 MB", {400, 413}, CHAT, chat(messages=[{"role": "x " * (39 * MIB // 10)}])),
    posted("forty thousand messages", {400, 413}, CHAT, chat(messages=[{"role": "u", "content": ""}] * 40_000)),
    posted("thousands of parts", {200, 400}, CHAT, chat(messages=[{"role": "assistant", "content": PARTS}])),
    posted("many long prompts", {400, 413}, COMPLETIONS, completion(prompt=["some text " * 3000] * 250)),
    posted("7.9 MB to count", {200, 400}, "/tokenize", {"prompt": "text, " * (79 * MIB // 60)}),
    posted("a million empty lists", {400, 413}, COMPLETIONS, b'{"prompt": [' + b"[]," * MIB + b"[]]}"),
    posted("a million empty messages", {400, 413}, CHAT, b'{"messages": [' + b"{}," * MIB + b"{}]}"),
    posted("four million numbers", {400, 413}, COMPLETIONS, b'{"prompt": [' + b"1," * (4 * MIB - 100) + b"1]}"),
    posted("nested lists", {400, 413}, COMPLETIONS, b'{"prompt": ' + b"[" * MIB),
    posted("a long number", {400, 413}, COMPLETIONS, b'{"prompt": "x", "seed": ' + b"1" * 4 * MIB + b"}"),
    posted("numbers at the edges", {200, 400}, COMPLETIONS, completion(top_k=2**31 - 1),
        completion(min_tokens=2**31 - 1), completion(seed=-(2**63)), completion(n=129), completion(logprobs=21),
        completion(stop=["x"] * 65), completion(logit_bias={str(i): 1 for i in range(5000)}),
        completion(stop_token_ids=list(range(5000)))),
    posted("one word of 2 MB", {400, 413}, COMPLETIONS, completion(prompt="x" * 2 * MIB)),
    posted("white space of 2 MB", {400, 413}, COMPLETIONS, completion(prompt=" \n\t" * (2 * MIB // 3))),
    posted("marks on one letter", {400, 413}, COMPLETIONS, completion(prompt="a" + "\u0301\u0327" * (MIB // 4))),
    posted("digits of 2 MB", {200, 400, 413}, "/tokenize", {"prompt": "1" * 2 * MIB}),
    posted("text of tokens that are half a character", {200, 400}, "/detokenize", {"tokens": [200] * 500_000}),
    posted("one key a million times", {400, 413}, COMPLETIONS, b"{" + b'"prompt": "x",' * (MIB // 2) + b'"n": 0}'),
    posted("choices of a million texts", {400, 413}, COMPLETIONS, structured(choice=[f"{i}" for i in range(MIB // 2)])),
    posted("a schema of a million values", {400, 413}, COMPLETIONS, structured(json={"enum": list(range(MIB))})),
    posted("patterns that repeat repetitions", {200, 400}, COMPLETIONS,
        *(structured(regex=regex) for regex in ("(a*)*b", "((a{1,999}){1,999}){1,999}", "(a|a|b)*" * 999))),
    posted("64 long stop texts", {400}, COMPLETIONS, completion(stop=["x" * 9000 + f"{i}" for i in range(64)])),
    posted("scores of many prompts", {400}, COMPLETIONS, completion(prompt=[[5] * 4000] * 32, echo=True, logprobs=20),
        completion(prompt=[[5] * 4000] * 32, prompt_logprob_token_ids=list(range(128)))),
    posted("hundreds of tools", {200, 400, 413}, CHAT,
        chat(tools=[{**TOOL, "function": {"name": f"f{i}", "parameters": {"required": ["a"] * 99}}}
                    for i in range(400)])),
    posted("files as images", {200}, CHAT,
        *(chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
          for url in ("file:///etc/passwd", "http://127.0.0.1:1/"))),
    Hostile("chunks of one byte", {0, 200, 400, 413},
        raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")),
    Hostile("two thousand requests at once", {0, 200},
        raw(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * 2_000
            + b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")),
    Hostile("ten thousand headers", {0, 200, 400, 431},
        raw(b"GET /ping HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n")),
    Hostile("a body that does not end", {0, 413}, endless_body),
    Hostile("a body that does not come", {0, 408}, raw(head(COMPLETIONS, 1000), count=20, drip=True)),
    Hostile("half-open connections", {0}, raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", count=500)),
    Hostile("connections that say nothing", {0}, raw(b"", count=500)),
    Hostile("a head that does not end", {0}, raw(b"GET / HTTP/1.1\r\nx: ", drip=True)),
    Hostile("a head of megabytes", {0, 400}, raw(b"GET / HTTP/1.1\r\nx: " + b"y" * 4 * MIB)),
    Hostile("no HTTP", {0, 400}, raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", count=50)),
]  # fmt: skip
