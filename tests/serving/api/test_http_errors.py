"""Whatever a client does wrong: the right status, OpenAI's error object, a healthy server, unaffected neighbors."""

import json
import threading

import pytest
from fastapi.exceptions import RequestValidationError

from serving.api.http.errors import ApiError, as_api_error
from serving.api.http.protocol.common import ErrorResponse
from serving.api.http.text import check_fits
from serving.core.errors import RequestFailed
from tests.support.servers.refused_values import BODY, PATHS, REFUSED

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
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(60)
    assert set(found) == {expected}
    assert server.http.get("/health").status_code == 200


def assert_error(response, status, *, param=None, says=""):
    assert response.status_code == status, response.text
    error = ErrorResponse.model_validate(response.json()).error
    assert param is ... or error.param == param or error.code == "too_deeply_nested"
    assert says in error.message
    assert not error.message.startswith(f"{error.param}: {error.param} ")
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe\x00", b'{"prompt": "\xff"}', b"[" * 10_000, b'{"prompt": NaN', b"\x00"]
)
def test_malformed_json(server, path, body):
    assert_error(server.http.post(path, content=body, headers=JSON), 400)


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


@pytest.mark.parametrize("words", ["seed is odd", "seeds are odd"])
def test_a_message_that_begins_with_its_field_names_it_once(words):
    error = as_api_error(RequestValidationError([{"type": "value_error", "loc": ("body", "seed"), "msg": words}]))
    assert error.message == ("seed is odd" if words.startswith("seed ") else "seed: seeds are odd")


def test_a_request_that_the_engine_gives_up():
    error = as_api_error(RequestFailed("the state is lost"))
    assert (error.status, error.code, error.message) == (502, "request_failed", "the state is lost")


def test_long_messages_are_cut():
    assert len(ApiError(400, "x" * 100_000).body()) < 1000


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/rerank", "/pooling", "/v1/audio/transcriptions"])
def test_what_there_is_not(server, path):
    answer = server.http.post(path, json={"model": "demo", "input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_supported"
    assert "generates text" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_in_the_words_of_each_api():
    """Clients recognize both by these words, and then shorten the conversation."""
    for at_least in (False, True):
        with pytest.raises(ApiError) as refused:
            check_fits(600, 512, "messages", at_least=at_least)
        chat, messages = (json.loads(refused.value.body(path)) for path in ("/v1/chat/completions", "/v1/messages"))
        for words in ("maximum context length is 512 tokens", "prompt is too long", "exceeds the context window"):
            assert words in chat["error"]["message"]
        assert messages["type"] == "error"
        assert messages["error"]["type"] == "invalid_request_error"
        assert messages["error"]["message"] == "prompt is too long: 600 tokens > 511 maximum"
