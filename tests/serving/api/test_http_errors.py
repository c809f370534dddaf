"""Whatever a client does wrong: the right status, OpenAI's error object, a healthy server, unaffected neighbors."""

import json
import socket
import threading

import pytest

from serving.api.http.errors import ApiError
from serving.api.http.protocol.common import ErrorResponse

PATHS = ["/v1/completions", "/v1/chat/completions"]
MESSAGES = [{"role": "user", "content": "x"}]
BODY = {
    "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x", "max_output_tokens": 1}, "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
}  # fmt: skip
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True, scope="module")
def neighbors_are_unaffected(server):
    """Other requests run meanwhile; their answers are what they always are."""

    def text():
        return server.complete("A neighbor", max_tokens=12).json()["choices"][0]["text"]

    def ask():
        while not over.is_set():
            found.append(text())

    expected, found, over = text(), [], threading.Event()
    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join()
    assert set(found) == {expected}
    assert server.http.get("/health").status_code == 200


def assert_error(response, status, *, param=None, says=""):
    assert response.status_code == status, response.text
    error = ErrorResponse.model_validate(response.json()).error
    assert param is ... or error.param == param or error.code == "too_deeply_nested"
    assert says in error.message
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe\x00", b'{"prompt": "\xff"}', b"[" * 10_000, b'{"prompt": NaN', b"\x00"]
)
def test_malformed_json(server, path, body):
    assert_error(server.http.post(path, content=body, headers=JSON), 400)


DEEP: dict = {}
for _ in range(300):
    DEEP = {"a": DEEP}


def tool(parameters=None):
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **(parameters or {})}}}


WRONG_VALUES = (
    ("temperature", -1), ("temperature", "hot"), ("temperature", []), ("top_p", -1), ("top_p", 2), ("min_p", -0.1),
    ("max_tokens", -1), ("max_tokens", "many"), ("n", 0), ("n", 10**6), ("top_k", 2**40), ("min_tokens", 2**40),
    ("stop", 5), ("stop", [1]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("seed", 2**80),
    ("logit_bias", [1]), ("logit_bias", {"5": "much"}), ("presence_penalty", 3), ("repetition_penalty", 0),
    ("stream", "perhaps"), ("priority", 2**40), ("cache_salt", ""), ("model", 5), ("response_format", "json"),
    ("cache_salt", "x" * 2000), ("truncate_prompt_tokens", -2), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
    ("use_beam_search", True), ("logits_processors", ["x"]), ("n", 1.5), ("stop", [None]),
)  # fmt: skip
"""Of both older APIs."""
DO_NOT_FIT = (
    ({"stop": ["x"] * 65}, "stop must be a string or a list of at most 64 strings"), ({"stop": [""]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
    ({"guided_json": {}}, '{"structured_outputs": {"json": ...}}'),
)  # fmt: skip
OF_ONE_API = {
    "/v1/completions": (
        *(({"prompt": prompt}, "prompt", "") for prompt in
          (None, 5, {}, [], [[]], ["x", 5], [1, "x"], [1.5], [True], [-1], [10**9], [[5], [2**40]])),
        ({"suffix": "end"}, "suffix", "suffix is not supported"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        ({"prompt": ["x"] * 1025}, "n", "1025 choices"), ({"prompt": ["x"] * 600, "n": 2}, "n", "1200 choices"),
        *(({"structured_outputs": form}, ..., "") for form in (
            {}, {"regex": "(["}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": [""]},
            {"grammar": "start: nothing"}, {"grammar": "root ::= ("}, {"json": {"type": "nonsense"}}, {"json": "{"},
            {"invented": 1})),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, ..., ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", ""),
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        *(({"prompt": [5, 6], "prompt_logprob_token_ids": ids}, ..., "prompt_logprob_token_ids")
          for ids in ([-1], [10**6], list(range(129)), ["a"], 3)),
    ),
    "/v1/chat/completions": (
        *(({"messages": messages}, ..., "") for messages in (
            None, [], "x", [5], [{}], [{"role": "", "content": "x"}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": [5]}])),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"tool_choice": "sometimes"}, "tool_choice", "tool_choice must be none, auto, required"),
        *(({"tool_choice": choice, "tools": [tool()]}, "tool_choice", "") for choice in (
            {"type": "function", "function": {"name": "sub"}}, {"type": "function"}, {"type": "allowed_tools"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "sub"}}]}})),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tools": [tool()], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, ..., "combined"),
        *(({"tool_choice": choice, "tools": [tool(parameters)]}, "tools", "") for choice in ("required", "auto")
          for parameters in (
              {"required": 5}, {"required": [5]}, {"properties": 5}, {"properties": {"a": 5}},
              {"properties": {"a": {"type": "string", "enum": 5}}})),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        ({"response_format": {"type": "json_object", "schema": {"type": "nonsense"}}}, "response_format", ""),
    ),
    "/v1/responses": (
        *(({"input": items}, "input", "") for items in (
            [], [{"type": "item_reference", "id": "x"}], [{"content": "x"}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": True}], [{"type": "reasoning", "content": 5}],
            [{"type": "function_call_output", "call_id": "c", "output": 5}])),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"background": True}, "background", ""), ({"conversation": "c"}, "conversation", ""),
        ({"temperature": -1}, "temperature", ""), ({"tool_choice": "required"}, "tool_choice", ""),
        ({"text": {"format": {"type": "json_schema"}}}, "text", ""), ({"input": "word " * 3000}, "input", "at most"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}}, "text", ""),
        ({"n": 3}, "n", "n is not supported"),
        ({"tools": [{"type": "function", "name": "f", "parameters": DEEP}]}, None, "nested"),
    ),
    "/v1/messages": (({"n": 3}, "n", "n is not supported"),),
}  # fmt: skip
"""Fields, the parameter that the error names (... for any), and what the message says."""
REFUSED = (
    *((path, {name: value}, name, name) for path in PATHS for name, value in WRONG_VALUES),
    *((path, fields, next(iter(fields)), says) for path in PATHS for fields, says in DO_NOT_FIT),
    *((path, *row) for path, rows in OF_ONE_API.items() for row in rows),
)


@pytest.mark.parametrize(("path", "fields", "param", "says"), REFUSED)
def test_refused_values(server, path, fields, param, says):
    assert_error(server.http.post(path, json=BODY[path] | fields), 400, param=param, says=says)


def test_json_that_is_no_request(server):
    for path in PATHS:
        for body in (b"[]", b"null", b"3", b'"text"', b"{}"):
            assert_error(server.http.post(path, content=body, headers=JSON), 400, param=...)
    body = b'{"prompt": "x", "temperature": Infinity}'
    answer = server.http.post("/v1/completions", content=body, headers=JSON)
    assert_error(answer, 400, param="temperature", says="temperature")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(server, stream):
    for prompt in ("word " * 2000, [5] * 512):
        response = server.http.post("/v1/completions", json={"prompt": prompt, "stream": stream})
        assert_error(response, 400, param="prompt", says="at most 511 are allowed")
        assert "this model's maximum context length is" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_unknown_model(server, path):
    fields = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [5], "model": "nope"}
    if path == "/tokenize":
        del fields["messages"]
    response = server.http.post(path, json=fields)
    assert_error(response, 404, param="model", says="'nope' does not exist")
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_body_that_is_too_large(server):
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    assert_error(server.http.post("/v1/completions", content=body, headers=JSON), 413, says="larger than")
    # The same without a length in front.
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    assert_error(server.http.post("/v1/completions", content=pieces, headers=JSON), 413, says="larger than")


def test_half_a_character(server):
    for body in (b'{"prompt": "\\ud800"}', b'{"prompt": "x", "cache_salt": "\\uDC00"}'):
        assert_error(server.http.post("/v1/completions", content=body, headers=JSON), 400, says="surrogate")
    whole = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    assert server.http.post("/v1/completions", content=whole, headers=JSON).status_code == 200


def test_paths_methods_and_kinds(server):
    assert_error(server.http.get("/v2/completions"), 404)
    assert_error(server.http.get("/v1/models/nope"), 404, param="model")
    assert_error(server.http.get("/v1/completions"), 405)
    assert_error(server.http.post("/v1/completions", data={"prompt": "x"}), 415, says="application/json")
    assert_error(server.http.post("/v1/completions", content=b'{"prompt": "x"}'), 415)


def test_unknown_fields_are_ignored_and_named(server):
    response = server.complete(max_tokens=1, invented=1, **{"bad\r\nname": 2}, absent=None, user="me")
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "invented"
    assert "x-ignored-fields" not in server.complete(max_tokens=1).headers


def test_a_client_that_speaks_no_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    negative = b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n"
    for message in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", negative):
        with socket.create_connection((host, int(port)), timeout=5) as wire:
            wire.sendall(message)
            wire.shutdown(socket.SHUT_WR)
            while wire.recv(4096):
                pass


def test_long_messages_are_cut():
    assert len(ApiError(400, "x" * 100_000).body()) < 1000
