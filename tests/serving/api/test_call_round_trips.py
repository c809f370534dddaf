"""A call in each format that vLLM's parsers have names for, written by the demo model and read by the server."""

import json

import pytest

from serving.vllm.command import translate
from tests.support.text_clients import APIS, ask
from tests.support.written_calls import FORMS, written

pytestmark = pytest.mark.full

NAME = "forecast"
ARGUMENTS = {"city": 'Zürich, "old" <b>\n(it\'s)', "days": 3, "options": {"units": ["C", None], "exact": True}}
TOOL = {"name": NAME, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}}}}  # fmt: skip
PARSERS = {"granite4": "hermes", "nemotron_v3": "qwen3_coder"} | {form: form for form in FORMS if form != "nemotron"}
"""vLLM's names of formats, and ours."""


@pytest.fixture(params=PARSERS)
def text(request, server, monkeypatch):
    """A call in the format of a parser of vLLM, which the server uses."""
    _, form = translate(["--tool-call-parser", request.param]).words
    monkeypatch.setitem(server.context.__dict__, "tool_calls", form)
    assert form == PARSERS[request.param]
    return written(form, (NAME, ARGUMENTS), literal=repr if form == "lfm2" else json.dumps)


def both(api, server, text):
    """The answer of a model that can only write `text`; as events it is the same."""
    fields = {"tools": [TOOL], "limit": 450, "structured_outputs": {"choice": [text]}}
    whole, streamed = (ask(api, server, stream=stream, **fields) for stream in (False, True))
    assert (streamed.text, streamed.calls, streamed.reason) == (whole.text, whole.calls, whole.reason)
    return whole


@pytest.mark.parametrize("api", APIS)
def test_a_call_comes_back_as_it_was_meant(server, text, api):
    answer = both(api, server, f"I look. {text}")
    assert (answer.text, answer.reason) == ("I look.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [(NAME, ARGUMENTS)]


@pytest.mark.parametrize("hostile", ["\\ud800", "[" * 40, "NaN"])
def test_hostile_values_give_well_formed_answers(server, text, hostile):
    assert len(both("chat/completions", server, text.replace("3", hostile)).calls) <= 1
