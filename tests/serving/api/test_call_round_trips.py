"""A call in each format that vLLM's parsers have names for, written by the demo model and read by the server."""

import json

import pytest

from serving.vllm.command import translate
from tests.support.written_calls import FORMS, written

pytestmark = pytest.mark.full

NAME = "forecast"
ARGUMENTS = {"city": 'Zürich, "old" <b>\n(it\'s)', "days": 3, "options": {"units": ["C", None], "exact": True}}
TOOL = {"type": "function", "function": {"name": NAME, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}}}}}  # fmt: skip


PARSERS = {"granite4": "hermes", "nemotron_v3": "qwen3_coder"} | {form: form for form in FORMS if form != "nemotron"}
"""vLLM's names of formats, and ours."""


@pytest.fixture(params=PARSERS)
def text(request, server, monkeypatch):
    """A call in the format of a parser of vLLM, which the server uses."""
    _, form = translate(["--tool-call-parser", request.param]).words
    monkeypatch.setitem(server.context.__dict__, "tool_calls", form)
    assert form == PARSERS[request.param]
    return written(form, (NAME, ARGUMENTS), literal=repr if form == "lfm2" else json.dumps)


def ask(server, text, **fields):
    """The model can only write `text`."""
    return server.openai().chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Weather?"}], tools=[TOOL], max_completion_tokens=450,
        extra_body={"structured_outputs": {"choice": [text]}}, **fields,
    )  # fmt: skip


def streamed(server, text):
    """Content, calls as (name, arguments) and the finish reason."""
    content, calls, reason = "", [], None
    for chunk in ask(server, text, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.function.name is not None:
                    assert call.index == len(calls)
                    calls.append((call.function.name, ""))
                calls[-1] = (calls[-1][0], calls[-1][1] + (call.function.arguments or ""))
    return content, calls, reason


def whole(server, text):
    choice = ask(server, text).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def test_a_call_comes_back_as_it_was_meant(server, text):
    content, calls, reason = whole(server, f"I look. {text}")
    assert (content, reason) == ("I look.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [(NAME, ARGUMENTS)]
    assert streamed(server, f"I look. {text}") == (content, calls, reason)


def test_a_call_in_a_message(server, text):
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 450,
        "tools": [{"name": NAME, "input_schema": TOOL["function"]["parameters"]}],
        "structured_outputs": {"choice": [text]},
    }  # fmt: skip
    answer = server.http.post("/v1/messages", json=body).json()
    assert [(block["name"], block["input"]) for block in answer["content"]] == [(NAME, ARGUMENTS)]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("hostile", ["\\ud800", "[" * 40, "NaN"])
def test_hostile_values_give_well_formed_answers(server, text, hostile):
    text = text.replace("3", hostile)
    content, calls, reason = whole(server, text)
    assert len(calls) <= 1
    assert streamed(server, text) == (content, calls, reason)
