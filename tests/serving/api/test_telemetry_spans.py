"""OpenTelemetry spans, as a collector receives them."""

import re
import sys

import pytest
from fastapi import FastAPI, Request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mamba_jax.version import install_advice
from serving.api.http.settings import ConnectionBounds, ServerSettings
from serving.api.traces import Traces
from serving.config import ConfigError
from tests.support.servers.live_server import running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def spans_of(server, monkeypatch):
    """Runs something against the server and returns the spans that come of it, sent by OTLP over HTTP."""
    app, found = FastAPI(), []

    @app.post("/v1/traces")
    async def receive(request: Request) -> None:
        sent = ExportTraceServiceRequest.FromString(await request.body())
        found.extend(span for all in sent.resource_spans for scope in all.scope_spans for span in scope.spans)

    def spans(action):
        action()
        server.assert_idle()
        traces.close()
        return found

    with running(app, ConnectionBounds()) as (_, url):
        traces = Traces(f"{url}/v1/traces", "demo")
        monkeypatch.setattr(server.context, "traces", traces)
        yield spans


def attributes(span):
    kinds = ((each, each.value.WhichOneof("value")) for each in span.attributes)
    return {each.key: getattr(each.value, kind) for each, kind in kinds if kind != "array_value"}


def test_a_prompt_is_a_span_of_its_clients_trace(server, spans_of):
    body = {"model": "demo", "prompt": ["one thing", "another thing"], "max_tokens": 5, "ignore_eos": True}
    spans = spans_of(lambda: server.http.post("/v1/completions", json=body, headers=HEADERS).raise_for_status())
    assert len(spans) == 2
    for span in spans:
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == PARENT
        told = attributes(span)
        assert told["gen_ai.usage.output_tokens"] == 5
        assert told["gen_ai.request.model"] == "demo"
        assert 0 <= told["mamba_jax.queue_time"] <= told["mamba_jax.time_to_first_token"] <= told["mamba_jax.e2e_time"]
        assert told["mamba_jax.e2e_time"] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 + 0.01
        assert not any("thing" in str(value) for value in told.values())


def test_a_stream_that_is_left_is_said_to_be(server, spans_of):
    body = {"model": "demo", "prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}

    def leave():
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())

    (span,) = spans_of(leave)
    assert attributes(span)["mamba_jax.aborted"] is True
    assert span.parent_span_id == b""


def test_without_an_endpoint_nothing_is_imported_and_without_the_sdk_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    Traces(None, "demo").close()
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry .*" + re.escape(install_advice("traces"))):
        Traces("http://localhost:4318/v1/traces", "demo")
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        ServerSettings.create(otlp_traces_endpoint="localhost")
