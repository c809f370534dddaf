"""Odd requests, and what the API's own description allows or not, get no answer that is the server's fault."""

import contextlib
import json

import httpx
import hypothesis
import pytest

from serving.split.router.app import create_router
from serving.split.settings import RouterSettings
from tests.support.servers.hostile_requests import HOSTILE, NUM_ODD
from tests.support.servers.live_server import running
from tests.support.waiting import comes_true, is_ready


@pytest.fixture(scope="module")
def front(server):
    settings = RouterSettings.create(decode=(server.url,), routing="affinity", log_requests=False)
    app = create_router(settings)
    with running(app, settings, leave=app.state.relay.leave) as (_, url):
        assert comes_true(lambda: is_ready(url))
        yield url


@pytest.mark.parametrize("hostile", HOSTILE[:NUM_ODD], ids=lambda hostile: hostile.name)
def test_no_odd_request_gives_a_server_error(front, hostile):
    """In front of a server is a router, which sends on what it does not refuse itself."""
    answers = hostile.send(front)
    assert answers <= hostile.allowed, answers
    status = httpx.get(front + "/status").json()
    assert all(worker["up"] for worker in status["decode"])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_answer_is_the_servers_fault(server, mode, request):
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra test")
    examples = 25 if request.config.option.slow else 10
    options = {"max_examples": examples, "deadline": None, "derandomize": True, "database": None}
    description = schemathesis.openapi.from_url(server.url + "/openapi.json")
    met = set()
    for found in description.get_all_operations():
        operation = found.ok()

        @hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck), **options)
        @hypothesis.given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def ask(case):
            body = case.body
            if isinstance(body, dict):
                if "model" in body:  # any other is 404, before anything else is looked at
                    body["model"] = "demo"
                most = {"/v1/chat/completions": "max_completion_tokens", "/v1/responses": "max_output_tokens"}
                name = most.get(case.path, "max_tokens")
                if case.path.startswith("/v1/") and isinstance(body.get(name), int | None):
                    body[name] = min(body.get(name) or 4, 4)
            answer = case.call(timeout=120)
            assert answer.status_code < 500 or answer.status_code == 503, (body, answer.status_code, answer.content)
            met.add((case.path, answer.status_code // 100))

        # (Of a path that takes nothing there is nothing wrong to send.)
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            ask()
    server.assert_idle()
    assert ("/v1/completions", 2 if mode == "positive" else 4) in met


@pytest.mark.parametrize("place", ["server", "router"])
def test_a_streamed_response_to_a_prompt_that_is_too_long_fails_in_the_stream(server, front, place):
    """Codex recognizes it there only, and then shortens the conversation."""
    url, body = (server.url if place == "server" else front) + "/v1/responses", {"input": "word " * 3000}
    told = httpx.post(url, json=body, timeout=60)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = httpx.post(url, json=body | {"stream": True}, timeout=60)
    assert answer.status_code == 200
    error, failed = (json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: "))
    assert (error["type"], error["error"]) == ("error", told.json()["error"])
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
