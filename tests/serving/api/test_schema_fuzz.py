"""Whatever the API's own description allows, and what it does not: no answer is the server's fault but 503."""

import contextlib

import hypothesis
import pytest

pytestmark = pytest.mark.full

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra test")

EXAMPLES = 25
"""Of each endpoint, in each mode."""


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_answer_is_the_servers_fault(server, mode):
    description = schemathesis.openapi.from_url(server.url + "/openapi.json")
    met = set()
    for found in description.get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            body = case.body
            if isinstance(body, dict):
                if "model" in body:  # any other is 404, before anything else is looked at
                    body["model"] = "demo"
                if case.path.startswith("/v1/") and isinstance(body.get("max_tokens"), int | None):
                    body["max_tokens"] = min(body.get("max_tokens") or 4, 4)
            answer = case.call(timeout=120)
            assert answer.status_code < 500 or answer.status_code == 503, (body, answer.status_code, answer.content)
            met.add((case.path, answer.status_code // 100))

        # (Of a path that takes nothing there is nothing wrong to send.)
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            ask()
    server.assert_idle()
    wanted = {"positive": {("/v1/completions", 2)}, "negative": {("/v1/completions", 4)}}
    assert wanted[mode.value] <= met
