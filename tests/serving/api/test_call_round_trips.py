"""A call in each format that vLLM's parsers have names for, written by the demo model and read by the server."""

import json

import pytest

from serving.vllm.command import translate

pytestmark = pytest.mark.full

NAME = "forecast"
ARGUMENTS = {"city": 'Zürich, "old" <b>\n(it\'s)', "days": 3, "options": {"units": ["C", None], "exact": True}}
TOOL = {"type": "function", "function": {"name": NAME, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}}}}}  # fmt: skip


def plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def as_python(write):
    return f"{NAME}({', '.join(f'{key}={write(value)}' for key, value in ARGUMENTS.items())})"


AS_JSON = json.dumps({"name": NAME, "arguments": ARGUMENTS}, ensure_ascii=False)
HERMES = f"<tool_call>\n{AS_JSON}\n</tool_call>"
PARAMETERS = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in ARGUMENTS.items())
QWEN = f"<tool_call>\n<function={NAME}>\n{PARAMETERS}</function>\n</tool_call>"
LING = "".join(f"<arg_key>{key}</arg_key><arg_value>{plain(value)}</arg_value>" for key, value in ARGUMENTS.items())
WRITTEN = {
    "granite4": HERMES,
    "hermes": HERMES,
    "jamba": f"<tool_calls>[\n    {AS_JSON}\n]</tool_calls>",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>"
    f"{json.dumps(ARGUMENTS)}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": f"<|tool_call_start|>[{as_python(repr)}]<|tool_call_end|>",
    "ling3": f"<tool_call>{NAME}{LING}</tool_call>",
    "nemotron_v3": QWEN,
    "olmo3": f"<function_calls>{as_python(json.dumps)}</function_calls>",
    "qwen3_coder": QWEN,
}


@pytest.fixture(params=WRITTEN)
def parser(request, server, monkeypatch):
    """A parser's name; the server uses it."""
    _, form = translate(["--tool-call-parser", request.param]).words
    monkeypatch.setitem(server.context.__dict__, "tool_calls", form)
    return request.param


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


def test_a_call_comes_back_as_it_was_meant(server, parser):
    content, calls, reason = whole(server, f"I look. {WRITTEN[parser]}")
    assert (content, reason) == ("I look.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [(NAME, ARGUMENTS)]
    assert streamed(server, f"I look. {WRITTEN[parser]}") == (content, calls, reason)


def test_a_call_in_a_message(server, parser):
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 450,
        "tools": [{"name": NAME, "input_schema": TOOL["function"]["parameters"]}],
        "structured_outputs": {"choice": [WRITTEN[parser]]},
    }  # fmt: skip
    answer = server.http.post("/v1/messages", json=body).json()
    assert [(block["name"], block["input"]) for block in answer["content"]] == [(NAME, ARGUMENTS)]
    assert answer["stop_reason"] == "tool_use"


HOSTILE = ("\\ud800", "[" * 40, "NaN")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_values_give_well_formed_answers(server, parser, hostile):
    text = WRITTEN[parser].replace("3", hostile)
    content, calls, reason = whole(server, text)
    assert len(calls) <= 1
    assert streamed(server, text) == (content, calls, reason)
