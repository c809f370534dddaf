"""Calls of tools in what a model has written: found whole and in pieces, and told as OpenAI's API does."""

import asyncio
import json

import pytest

from checkpoints.load import load_tokenizer
from checkpoints.tokenizer import Tokenizer
from serving.api.http import ServerSettings, chat
from serving.api.http.call_pieces import whole_calls
from serving.api.http.chat import ChatWriter
from serving.api.http.chat_turn import ChatTurn
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
    read, shown, pieces = reader(form), "", []
    for at in range(0, len(text), piece):
        more, found = read.push(text[at : at + piece])
        shown += more
        pieces += found
        assert "<t" not in shown.lower()
    more, found = read.push("", last=True)
    calls = whole_calls(pieces + found)
    assert (shown + more, told(calls)) == ("I look <b>it</b> up.", [ONE, ONE])
    assert read.count == 2
    assert len({call.id for call in calls}) == 2


ODD = {
    "hermes": [
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', [("add", {"a": 2})]),
        ('<tool_call>{"name": "add"}</tool_call>', [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": {"note": "</tool_call> {[\\""}, "id": 3}</tool_call>',
         [("add", {"note": '</tool_call> {["'})]),
        ('<tool_call>[{"name": "add", "arguments": {}}, {"parameters": {"a": 4}, "name": "add"}]</tool_call>',
         [("add", {}), ("add", {"a": 4})]),
        ('<tool_call>{"name": "add", "arguments": {"a": {"b": [1, {}]}}}', [("add", {"a": {"b": [1, {}]}})]),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
        ("<tool_call><function=add><parameter=note>a\n\n</parameter><parameter=x>null</parameter></tool_call>",
         [("add", {"note": "a\n", "x": None})]),
        ("<tool_call>\n<function=add>\n<parameter=note>\n<b> \"</tool_call>\n</param\n</parameter>\n</function>\n"
         "<function=add>\nso\n<parameter=a>\n[1, 2]\n</parameter>\n</function></tool_call>",
         [("add", {"note": '<b> "</tool_call>\n</param'}), ("add", {"a": [1, 2]})]),
    ],
}  # fmt: skip
"""What models also write."""


@pytest.mark.parametrize(("form", "text", "calls"), [(form, *case) for form, cases in ODD.items() for case in cases])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_odd_calls_are_read_too(form, text, calls, piece):
    read, shown, pieces = reader(form), "", []
    for at in range(0, len(text), piece):
        more, found = read.push(text[at : at + piece], last=at + piece >= len(text))
        shown, pieces = shown + more, pieces + found
    assert (shown, told(whole_calls(pieces))) == ("", calls)


def test_text_after_a_call_that_lacks_its_end_is_shown():
    text = "<tool_call>\n<function=now>\n</tool_call> So."
    read = reader("qwen3_coder")
    shown, pieces = read.push(text)
    assert (shown + read.push("", last=True)[0], told(whole_calls(pieces))) == (" So.", [("now", {})])


@pytest.mark.parametrize("form", WRITTEN)
def test_arguments_come_piece_by_piece(form):
    read, text = reader(form), WRITTEN[form]
    pieces = [piece for letter in text for piece in read.push(letter)[1]]
    assert pieces[0].name == "add"
    assert not any(piece.name for piece in pieces[1:])
    assert len(pieces) > 5
    assert json.loads("".join(piece.arguments for piece in pieces)) == ONE[1]


@pytest.mark.parametrize("form", WRITTEN)
def test_only_the_first_call_where_one_is_wanted(form):
    read = ToolCallReader(form, [Tool.model_validate(TOOL)], most=1)
    assert told(whole_calls(read.push(WRITTEN[form] * 3, last=True)[1])) == [ONE]


@pytest.mark.parametrize("form", WRITTEN)
def test_the_last_call_may_lack_its_end(form):
    text = WRITTEN[form][: WRITTEN[form].rindex("</")]
    assert told(whole_calls(reader(form).push(text, last=True)[1])) == [ONE]


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
    request = ChatRequest.model_validate(body)
    return ChatWriter(responses, request, ChatTurn(responses, request, [1, 2]))


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
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}
    assert [(call["type"], call["function"]["name"]) for call in calls if "id" in call] == [("function", "add")]
    arguments = [call["function"]["arguments"] for call in calls if call["function"]["arguments"]]
    assert json.loads("".join(arguments)) == ONE[1]
    assert len(arguments) > 2  # piece by piece
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
