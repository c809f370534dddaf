"""What operators rely on: probes, keys, metrics, logs, draining, and what happens when the engine fails."""

import asyncio
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.api.http.json_values import weight
from serving.api.http.limits import Limits
from serving.api.http.settings import ServerSettings
from serving.api.http.text import characters
from serving.api.logs import JsonFormatter, TextFormatter
from serving.api.metrics import Metrics
from tests.support.servers.hostile_requests import raw


def test_probes(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert "version" in server.http.get("/version").json()
    info = server.http.get("/tokenizer_info").json()
    assert info["special_tokens"]["eos_token"]
    assert info["chat_template"] == info["chat_templates"]["default"]
    assert info["vocab_size"] > 100


def test_metrics(server):
    names = {
        "mamba_jax_" + name
        for name in (
            "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "prompt_tokens_total",
            "e2e_request_latency_seconds_count", "queue_time_seconds_count", "time_per_output_token_seconds_count",
            "generation_tokens_total", "requests_waiting", "requests_running", "steps_total", "preemptions_total",
            "lockstep_steps_total", 'slots{state="free"}', 'slots{state="cached"}', 'pages{state="used"}',
            'step_seconds_total{part="wait"}', 'model_info{model="demo"}',
        )
    }  # fmt: skip
    for _ in server.openai().completions.create(model="demo", prompt="x", max_tokens=4, stream=True):
        pass
    text = server.http.get("/metrics").text
    lines = {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names <= lines
    assert list(text_string_to_metric_families(text))
    tokens = server.metric("mamba_jax_generation_tokens_total")
    answered = 'mamba_jax_http_requests_total{path="/v1/completions",status="200"}'
    count = server.metric(answered)
    server.complete(max_tokens=5, ignore_eos=True)
    assert server.metric("mamba_jax_generation_tokens_total") == tokens + 5
    assert server.metric(answered) == count + 1


def test_status(server):
    status = server.http.get("/status").json()
    assert status["ready"]
    assert set(status["maps"]["slots"]) <= set("fuc")
    assert len(status["maps"]["slots"]) == 60
    assert len(status["maps"]["pages"]) == 160
    for pool in ("slots", "pages"):
        assert status["maps"][pool].count("c") == status["stats"][pool]["cached"]


async def through(limits, *, headers=(), path="/v1/models", method="GET", messages=()):
    """The messages that `limits` sends to one request."""
    send = mock.AsyncMock()
    scope = {"type": "http", "method": method, "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers]}
    await limits(scope, mock.AsyncMock(side_effect=messages), send)
    return [call.args[0] for call in send.await_args_list]


async def handled(settings, *, method="GET", **request):
    """What `Limits` makes of one request to an application that repeats bodies."""

    async def app(scope, receive, send):
        body = await receive() if method == "POST" else {}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body.get("body", b"")})

    return await through(Limits(app, ServerSettings.create(**settings), Metrics("m")), method=method, **request)


@pytest.mark.parametrize(
    ("header", "key", "path", "status"),
    [
        ("authorization", None, "/v1/models", 401), ("authorization", "Bearer wrong", "/v1/models", 401),
        ("authorization", "Bearer one", "/v1/models", 200), ("authorization", "bearer two", "/v1/models", 200),
        ("authorization", "Basic one", "/v1/models", 401), ("authorization", "Bearer é", "/v1/models", 401),
        ("authorization", None, "/health", 200), ("authorization", None, "/metrics", 200),
        ("authorization", None, "/tokenize", 401),
        # Anthropic's header carries a key too, and operators are clients.
        ("x-api-key", "one", "/v1/models", 200), ("x-api-key", "operator", "/v1/models", 200),
        ("x-api-key", "wrong", "/v1/models", 401), ("x-api-key", "", "/v1/models", 401),
    ],
)  # fmt: skip
def test_keys(header, key, path, status):
    headers = [] if key is None else [(header, key)]
    sent = asyncio.run(handled({"api_key": ("one", "two"), "admin_key": "operator"}, headers=headers, path=path))
    assert sent[0]["status"] == status
    if status == 401:
        assert json.loads(sent[1]["body"])["error"]["type"] == "authentication_error"


JSON = [("content-type", "application/json")]


def posted(*messages, headers=JSON, **settings):
    return asyncio.run(handled(settings, headers=headers, method="POST", messages=messages))


def test_bodies_in_pieces_without_a_type_or_with_too_many_values():
    nothing = {"type": "http.request", "body": b"", "more_body": False}
    assert posted(nothing, headers=[])[0]["status"] == 200
    assert posted(nothing, headers=[("content-length", "1")])[0]["status"] == 415
    pieces = [{"type": "http.request", "body": b"a" * 600, "more_body": True}] * 2
    last = {"type": "http.request", "body": b"b", "more_body": False}
    assert posted(*pieces, last, max_body_bytes=2000)[1]["body"] == b"a" * 1200 + b"b"
    assert posted(*pieces, last, max_body_bytes=1100)[0]["status"] == 413
    assert not posted(pieces[0], {"type": "http.disconnect"}, max_body_bytes=2000), "the client has left"
    sent = posted(nothing | {"body": b"[" + b"{}," * 1000 + b"{}]"}, max_body_values=2000)
    assert sent[0]["status"] == 413
    assert json.loads(sent[1]["body"])["error"]["code"] == "too_many_values"


def test_a_server_that_is_not_ready_or_has_failed(server):
    context = server.context
    context.ready = False
    try:
        answer = server.complete()
        assert answer.status_code == server.http.get("/ready").status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
        assert answer.headers["retry-after"]
        assert server.http.get("/health").status_code == 200
    finally:
        context.ready = True


def test_heads_doubled_hosts_and_encodings(server):
    for path in ("/health", "/", "/v1/models"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert server.http.head("/v1/completions").status_code == 405
    assert raw(b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n")(server.url) == {400}
    assert server.http.post("/v1/completions", content=b"{}", headers={"content-encoding": "gzip"}).status_code == 415
    error = server.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert error.headers["request-id"] == error.headers["x-request-id"]
    assert "request-id" not in server.http.get("/v1/models").headers
    for given, kept in (("mine-1", True), ("bad id!", False)):
        answer = server.http.get("/health", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) == kept


def test_draining_and_the_end(server):
    """A server that stops lets the running stream end, and then is gone. (It shares the session's programs.)"""
    other = server.other_server()
    stream = other.openai().completions.create(
        model="demo", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    chunks = [next(iter(stream))]
    other.uvicorn.should_exit = True
    refused = httpx.post(other.url + "/v1/completions", json={"prompt": "y"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["retry-after"] == "1"
    assert [httpx.get(other.url + path).status_code for path in ("/ready", "/health")] == [503, 200]
    chunks += stream
    assert sum(len(chunk.choices[0].token_ids) for chunk in chunks) == 100
    assert chunks[-1].choices[0].finish_reason == "length"
    other.thread.join(60)
    assert not other.thread.is_alive()
    assert not other.async_engine.running
    with pytest.raises(httpx.ConnectError):
        httpx.get(other.url + "/health")


def test_an_engine_that_fails(server):
    other = server.other_server()
    other.async_engine.engine.loop.fault = mock.Mock(side_effect=RuntimeError("device lost"))
    with pytest.raises(openai.InternalServerError, match="device lost") as caught:
        other.openai().completions.create(model="demo", prompt="x", max_tokens=4)
    assert caught.value.status_code == 503
    assert other.http.get("/health").status_code == 503
    assert other.complete().status_code == 503
    assert other.http.get("/metrics").status_code == 200
    other.close()


def test_probes_do_not_wait_for_tokenizers(server, monkeypatch):
    """A text of megabytes is tokenized outside the event loop: probes are answered meanwhile."""
    begun, enough = threading.Event(), threading.Event()
    encode = server.context.codec.tokenizer.encode_batch

    def slowly(texts, **options):
        begun.set()
        assert enough.wait(60), "no probes were answered"
        return encode(texts, **options)

    monkeypatch.setattr(server.context.codec.tokenizer, "encode_batch", slowly)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.complete, "word " * 1000)
        assert begun.wait(60)
        for _ in range(6):
            assert httpx.get(server.url + "/health", timeout=60).status_code == 200
        enough.set()
    assert answer.result().status_code == 400


def test_numbers_do_not_wait_for_a_step(server):
    """Whatever the engine's thread is busy with, operators see how it stood."""
    enough = threading.Event()
    step = server.async_engine.threads[0].call(lambda engine: enough.wait(60))
    try:
        for path in ("/metrics", "/status", "/health", "/ready", "/"):
            assert server.http.get(path, timeout=10).status_code == 200
        assert server.metric("mamba_jax_steps_total") > 0
        assert not step.done()
    finally:
        enough.set()
        assert step.result(60)


async def test_the_bodies_of_all_requests_are_bounded():
    """Together they hold so many bytes; one more is put off, and there is room again when one has ended."""
    waiting = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        await waiting.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limits = Limits(app, ServerSettings.create(max_buffered_bytes=2500), Metrics("m"))

    async def one(size: int = 1000) -> int:
        body = {"type": "http.request", "body": b"1" * size, "more_body": False}
        return (await through(limits, method="POST", headers=JSON, messages=[body]))[0]["status"]

    tasks = [asyncio.create_task(one()) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert await one() == 503
    waiting.set()
    assert await asyncio.gather(*tasks) == [200, 200]
    assert await one() == 200
    assert await one(2501) == 413  # also later there is no room for it


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "a, [b], {c} \" \\"}, 10 * 3), ([1, 2, 3], 10 + 2), ([[], {}, "x"], 10 * 4 + 2),
        ({"a": {"b": ["\\\\\"", "c"]}}, 10 * 7 + 1),
    ],
)  # fmt: skip
def test_the_weight_of_values(value, expected):
    assert weight(json.dumps(value).encode(), 10_000) == expected


def test_a_weight_beyond_what_is_allowed():
    assert weight(b'["",' * 10_000, 1000) > 1000
    assert weight(b"[" * 10_000, 1000) > 1000


def test_characters_are_counted_until_there_are_enough():
    assert characters([{"role": "user", "content": "four"}], 1000) == 1 + 2 + len("roleusercontentfour")
    assert characters([["x"] * 1000] * 1000, 50) >= 50


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_a_log_line_is_one_line(form):
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "path %s", "args": ("/a\r\n12:00:00 INFO done",)})
    record.fields = {"path": "/b\n\x1b[31m\u2028é\ud800", "status": 200}
    line = form.format(record)
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "\\r\\n12:00:00" in line
    assert "é" in line or isinstance(form, JsonFormatter)
    assert isinstance(form, TextFormatter) or json.loads(line)["status"] == 200


def test_the_page_runs_only_its_own_script(server):
    headers = server.http.get("/").headers
    assert headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", policy)
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
