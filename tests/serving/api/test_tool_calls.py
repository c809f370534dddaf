"""Calls of tools in what a model has written: found whole and in pieces, and told as OpenAI's API does."""

import asyncio
import json

import pytest

from checkpoints.load import load_tokenizer
from checkpoints.tokenizer import Tokenizer
from serving.api.http import ServerSettings, chat
from serving.api.http.chat import ChatWriter
from serving.api.http.generation import ChoiceDelta, ResponseContext
from serving.api.http.protocol.chat import ChatRequest, Tool
from serving.api.http.text import TextCodec
from serving.api.http.tool_calls import ToolCallReader, form_of
from serving.config import ConfigError
from serving.engine.output import CompletionOutput, RequestOutput

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}},
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "1"}}\n</tool_call>'
MARKED = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n1\n</parameter>\n</function>\n"
WRITTEN = {
    "hermes": HERMES,
    "nemotron": '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "note": "1"}}]</TOOLCALL>',
    "qwen3_coder": f"{MARKED}</tool_call>",
}


def reader(form):
    return ToolCallReader(form, [Tool.model_validate(TOOL)])


def told(calls):
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


ONE = ("add", {"a": 1, "note": "1"})


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_calls_are_found_however_the_text_is_cut(form, piece):
    text = f"I look <b>it</b> up.\n{WRITTEN[form]}\n{WRITTEN[form]}\n"
    read, shown, calls = reader(form), "", []
    for at in range(0, len(text), piece):
        more, found = read.push(text[at : at + piece])
        shown += more
        calls += found
        assert "<t" not in shown.lower()
    more, found = read.push("", last=True)
    assert (shown + more, told(calls + found)) == ("I look <b>it</b> up.", [ONE, ONE])
    assert read.count == 2
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("form", WRITTEN)
def test_the_last_call_may_lack_its_end(form):
    text = WRITTEN[form][: WRITTEN[form].rindex("</")]
    assert told(reader(form).push(text, last=True)[1]) == [ONE]


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(
    "text", ["<tool_call>{</tool_call> ", "<TOOLCALL>[1]</TOOLCALL>", "a < b\n", '{"name": 1}', "<tool_"]
)
def test_what_is_no_call_stays_text(form, text):
    assert reader(form).push(text, last=True) == (text, [])


def test_the_form_is_that_of_the_chat_template():
    def of(template):
        return form_of(Tokenizer(load_tokenizer("demo")._backend, chat_templates={"default": template}))

    assert of("{{ '<TOOLCALL>' }}") == "nemotron"
    assert of("<tool_call>\n<function=x>") == "qwen3_coder"
    assert of("<tool_call>{{ tool | tojson }}</tool_call>") == "hermes"
    assert of("{{ messages }}") is form_of(None) is None
    assert ServerSettings.create(tool_call_parser="hermes").tool_call_parser == "hermes"
    with pytest.raises(ConfigError, match="tool_call_parser"):
        ServerSettings.create(tool_call_parser="other")


def writer(**fields):
    body = {"messages": [{"role": "user", "content": "1 + 1?"}], "tools": [TOOL]} | fields
    responses = ResponseContext(TextCodec(load_tokenizer("demo"), 512), "demo", tool_calls="hermes")
    return ChatWriter(responses, ChatRequest.model_validate(body), [1, 2])


def output(text, reason="stop"):
    choice = CompletionOutput(0, text, [5, 6], finish_reason=reason)
    return RequestOutput("r", None, [1, 2], [choice], finished=True)


def test_an_answer_with_a_call():
    (choice,) = writer().response([output(HERMES)]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert told(choice.message.tool_calls) == [ONE]
    assert choice.message.tool_calls[0].id.startswith("call_")
    assert writer().response([output(HERMES, "length")]).choices[0].finish_reason == "length"


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_nothing_is_read(fields):
    (choice,) = writer(**fields).response([output(HERMES)]).choices
    assert (choice.message.content, choice.finish_reason) == (HERMES, "stop")


def test_a_call_in_a_stream(monkeypatch):
    async def pieces(context, job, tally):
        text = f"So:\n{HERMES}"
        for at in range(0, len(text), 7):
            last = at + 7 >= len(text)
            yield ChoiceDelta(0, 0, output(text), text[at : at + 7], [5], None, "stop" if last else None, None)

    async def events():
        return [event async for event in writer(stream=True).events(None)]

    monkeypatch.setattr(chat, "stream", pieces)
    *chunks, done = asyncio.run(events())
    assert done == b"data: [DONE]\n\n"
    choices = [json.loads(chunk.removeprefix(b"data: "))["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "So:"
    (calls,) = [choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in calls] == [(0, "function", "add")]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
