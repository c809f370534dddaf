"""What operators rely on: probes, keys, metrics, logs, draining, and what happens when the engine fails."""

import asyncio
import json
import logging
import threading

import httpx
import openai
import pytest
from live_server import LiveServer
from prometheus_client.parser import text_string_to_metric_families

from serving.api.http.errors import ApiError
from serving.api.http.limits import Limits
from serving.api.http.settings import ServerSettings
from serving.api.logs import JsonFormatter, TextFormatter
from serving.api.metrics import Metrics
from serving.config import ConfigError


def test_probes(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    assert "version" in server.http.get("/version").json()


def test_nothing_compiles_after_the_warm_up(server):
    before = server.metric("mamba_jax_compilations_total")
    server.complete(["x"] * 9, max_tokens=3)
    server.complete("word " * 200, max_tokens=3, presence_penalty=1.0, logprobs=2, echo=True, n=3, temperature=1.0)
    assert server.metric("mamba_jax_compilations_total") == before > 0


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


def test_drafts_are_counted(server):
    server.complete("one two three one two three one two three one two", max_tokens=30, logit_bias={"70": 100})
    assert server.metric('mamba_jax_draft_tokens_total{position="1"}') > 0
    accepted = server.metric('mamba_jax_draft_tokens_accepted_total{position="1"}')
    assert accepted > 0
    usage = server.complete("again", max_tokens=30, logit_bias={"70": 100}).json()["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_status(server):
    status = server.http.get("/status").json()
    assert status["ready"]
    assert set(status["maps"]["slots"]) <= set("fuc")
    assert len(status["maps"]["slots"]) == 60
    assert len(status["maps"]["pages"]) == 160
    for pool in ("slots", "pages"):
        assert status["maps"][pool].count("c") == status["stats"][pool]["cached"]


def test_request_ids(server):
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.http.get("/health", headers={"x-request-id": "bad id!"}).headers["x-request-id"] != "bad id!"


def test_the_openapi_describes_itself(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(paths)


async def handled(settings, *, headers=(), path="/v1/models", method="GET", messages=()):
    """What `Limits` makes of one request: the messages it sends."""
    sent, waiting = [], list(messages)

    async def app(scope, receive, send):
        body = await receive() if method == "POST" else {}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body.get("body", b"")})

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers]}
    await Limits(app, ServerSettings.create(**settings), Metrics("m"))(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    ("key", "path", "status"),
    [
        (None, "/v1/models", 401), ("Bearer wrong", "/v1/models", 401), ("Bearer one", "/v1/models", 200),
        ("bearer two", "/v1/models", 200), ("Basic one", "/v1/models", 401), ("Bearer é", "/v1/models", 401),
        (None, "/health", 200), (None, "/metrics", 200), (None, "/tokenize", 401),
    ],
)  # fmt: skip
def test_keys(key, path, status):
    headers = [("authorization", key)] if key else []
    sent = asyncio.run(handled({"api_key": ("one", "two")}, headers=headers, path=path))
    assert sent[0]["status"] == status
    if status == 401:
        assert json.loads(sent[1]["body"])["error"]["type"] == "authentication_error"


def test_bodies_in_pieces_and_clients_that_leave():
    kind = [("content-type", "application/json")]
    pieces = [{"type": "http.request", "body": b"a" * 600, "more_body": True}] * 2
    last = {"type": "http.request", "body": b"b", "more_body": False}
    settings = {"max_body_bytes": 2000}
    sent = asyncio.run(handled(settings, headers=kind, method="POST", messages=[*pieces, last]))
    assert sent[1]["body"] == b"a" * 1200 + b"b"
    sent = asyncio.run(handled({"max_body_bytes": 1100}, headers=kind, method="POST", messages=[*pieces, last]))
    assert sent[0]["status"] == 413
    gone = [pieces[0], {"type": "http.disconnect"}]
    assert not asyncio.run(handled(settings, headers=kind, method="POST", messages=gone))


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


def test_draining_and_the_end(server):
    """A server that stops lets the running stream end, and then is gone. (It shares the session's programs.)"""
    from live_server import make_engine

    engine = make_engine()
    engine.loop.programs = server.async_engine.engine.loop.programs
    other = LiveServer(engine, prepare=False)
    other.wait_until_ready()
    stream = other.openai().completions.create(
        model="demo", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    chunks = [next(iter(stream))]
    other.uvicorn.should_exit = True
    chunks += stream
    assert sum(len(chunk.choices[0].token_ids) for chunk in chunks) == 100
    assert chunks[-1].choices[0].finish_reason == "length"
    other.thread.join(60)
    assert not other.thread.is_alive()
    assert not other.async_engine.running
    with pytest.raises(httpx.ConnectError):
        httpx.get(other.url + "/health")


def test_an_engine_that_fails(server):
    from live_server import make_engine

    engine = make_engine()
    engine.loop.programs = server.async_engine.engine.loop.programs
    other = LiveServer(engine, prepare=False)
    other.wait_until_ready()

    def fault(plan):
        raise RuntimeError("device lost")

    engine.loop.fault = fault
    with pytest.raises(openai.InternalServerError, match="device lost") as caught:
        other.openai().completions.create(model="demo", prompt="x", max_tokens=4)
    assert caught.value.status_code == 503
    assert other.http.get("/health").status_code == 503
    assert other.complete().status_code == 503
    assert other.http.get("/metrics").status_code == 200
    other.close()


def test_a_request_that_the_engine_gives_up(server):
    """Before the answer has begun it is a status, afterwards an event."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        name = json.loads(next(lines)[6:])["id"]
        asyncio.run(server.async_engine.call(lambda engine: engine.fail(name, "the state is lost")))
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last[6:])["error"]["message"] == "the state is lost"
    server.assert_idle()


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_logs(form):
    record = logging.makeLogRecord({"name": "serving", "levelname": "INFO", "msg": "it is %s", "args": ("here",)})
    record.fields = {"request_id": "r1", "status": 200}
    line = form.format(record)
    assert "\n" not in line
    assert "it is here" in line
    assert "r1" in line
    if isinstance(form, JsonFormatter):
        assert json.loads(line)["status"] == 200


def test_settings_have_clear_errors():
    with pytest.raises(ConfigError, match="port"):
        ServerSettings.create(port=70000)
    with pytest.raises(ConfigError, match="log_format"):
        ServerSettings.create(log_format="xml")


def test_errors_know_their_type():
    assert json.loads(ApiError(500, "x").body())["error"]["type"] == "server_error"
    assert json.loads(ApiError(503, "x").body())["error"]["type"] == "unavailable_error"


def test_probes_do_not_wait_for_tokenisers(server, monkeypatch):
    """A text of megabytes is tokenised beside the event loop: probes are answered meanwhile."""
    done, enough = [], threading.Event()
    encode = server.context.codec.tokenizer.encode

    def slowly(text, **options):
        assert enough.wait(60), "no probes were answered"
        return encode(text, **options)

    monkeypatch.setattr(server.context.codec.tokenizer, "encode", slowly)
    thread = threading.Thread(target=lambda: done.append(server.complete("word " * 200_000)))
    thread.start()
    answered = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while thread.is_alive():
            assert client.get("/health").status_code == 200
            answered += 1
            if answered > 5:
                enough.set()
    thread.join()
    assert done[0].status_code == 400
    assert answered > 5
