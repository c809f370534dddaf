"""Calls that a model must write: by `tool_choice`, and in each format that vLLM's parsers have names for."""

import json

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.inputs import ChatTurn
from serving.api.http.context import ResponseContext
from serving.api.http.parsing.formats import FORMATS
from serving.api.http.parsing.grammars import calls_grammar
from serving.api.http.protocol.chat import ChatRequest, Tool
from serving.api.http.text import TextCodec
from serving.engine.structured.grammars import Grammars, StructuredOutputs
from serving.vllm.flags import translate
from tests.support.servers.text_clients import ask as asked
from tests.support.servers.written_calls import FORMS, found, tokenizer_with, written

ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99}, "note": {"type": "string", "maxLength": 8},
        "kind": {"type": "string", "enum": ["x", "y"]}, "list": {"$ref": "#/$defs/few"},
    },
    "required": ["a", "kind"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
EMPTY = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "add"}}
TOOLS = [Tool.model_validate(tool) for tool in (ADD, NOW, EMPTY)]
ONE = {form: written(form, ("add", {"a": 1, "kind": "x"})) for form in FORMS}
TWO = {form: written(form, ("add", {"a": 1, "kind": "x"}), ("now", {})) for form in FORMS}


def followed(grammars, form, text, *, parallel, tools=TOOLS):
    """How many characters of a text the grammar takes."""
    constraint = grammars.start(StructuredOutputs(grammar=calls_grammar(form, tools, parallel=parallel)))
    ids = load_tokenizer("demo").encode(text, add_special_tokens=False)
    return len(load_tokenizer("demo").decode(ids[: constraint.advance(ids)]))


@pytest.mark.parametrize("form", ONE)
def test_grammars_take_calls_as_they_are_written(grammars, form):
    assert followed(grammars, form, ONE[form], parallel=False) == len(ONE[form])
    assert followed(grammars, form, TWO[form], parallel=True) == len(TWO[form])
    assert followed(grammars, form, TWO[form], parallel=False) < len(TWO[form])
    assert len(found(form, [TWO[form]], [ADD, NOW])[1]) == 2


@pytest.mark.parametrize("form", ONE)
@pytest.mark.parametrize(
    ("good", "bad"),
    [("add", "sub"), ("1", "many"), ("x", "z"), ("call>", "call!"), ("TOOLCALL>", "TOOLC>"), ("kind", "none")],
)
def test_grammars_take_nothing_else(grammars, form, good, bad):
    wrong = ONE[form].replace(good, bad, 1)
    if wrong != ONE[form]:
        assert followed(grammars, form, wrong, parallel=True) < len(wrong)


@pytest.mark.parametrize("form", ONE)
@pytest.mark.parametrize(("syntax", "definition"), [("lark", 'start: "add " /[0-9]+/'), ("regex", "add [0-9]+")])
def test_the_grammar_of_a_custom_tool(grammars, form, syntax, definition):
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    body = {"tools": [{"type": "custom", "custom": {"name": "patch", "format": grammar}}], "tool_choice": "required"}
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **body})
    turn = ChatTurn(ResponseContext(TextCodec(load_tokenizer("demo"), 512), "demo", tool_calls=form), request, [5])
    right, wrong = (written(form, ("patch", {"input": f"{word} 12"})) for word in ("add", "sub"))
    assert followed(grammars, form, right, parallel=False, tools=request.tools) == len(right)
    enforced = followed(grammars, form, wrong, parallel=False, tools=request.tools) < len(wrong)
    assert enforced == (syntax == "regex" or form in ("qwen3_coder", "ling3"))
    assert turn.job.ignored == ([] if enforced else ["schema.x-lark"])


def test_marks_that_are_special_tokens_are_forced_as_tokens():
    tokenizer = tokenizer_with(*FORMATS["kimi_k2"].marks)
    token_ids = TextCodec(tokenizer, 512).special_ids(FORMATS["kimi_k2"].marks)
    assert len(token_ids) == 5
    grammar = calls_grammar("kimi_k2", TOOLS, parallel=True, token_ids=token_ids)
    constraint = Grammars(tokenizer, tokenizer.vocab_size, (2, 4)).start(StructuredOutputs(grammar=grammar))
    ids = tokenizer.encode(TWO["kimi_k2"], add_special_tokens=False)
    assert set(token_ids.values()) < set(ids)
    assert constraint.advance(ids) == len(ids)


def ask(server, **fields):
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "1 + 1?"}], "tools": [ADD, NOW, EMPTY],
        "max_completion_tokens": 300, "temperature": 0,
    } | fields  # fmt: skip
    return server.openai().chat.completions.create(**body)


@pytest.mark.smoke
@pytest.mark.parametrize("form", [None, *ONE])
def test_a_required_call(server, monkeypatch, form):
    monkeypatch.setitem(server.context.__dict__, "tool_calls", form)
    some, every = ([tool["function"] for tool in tools] for tools in ((ADD, EMPTY), (ADD, NOW, EMPTY)))
    cases = [{"tool_choice": NAMED, "tools": every, "temperature": 0}, {"tools": some, "seed": 0, "temperature": 1.0}]
    complete = 0
    for fields in cases if form in (None, "qwen3_coder", "ling3") else cases[:1]:
        fields = {"force": True, "limit": 300} | fields
        whole, streamed = (asked("chat/completions", server, stream=stream, **fields) for stream in (False, True))
        assert (streamed.text, streamed.calls, streamed.reason) == ("", whole.calls, whole.reason)
        if whole.reason == "length":
            continue
        complete += 1
        ((name, arguments),) = whole.calls
        values = json.loads(arguments)
        if name == "add" or "tool_choice" in fields:
            assert values["a"] <= 99
            assert values["kind"] in ("x", "y")
            assert set(values) <= {"a", "note", "kind", "list"}
            assert streamed.events > 2
    assert complete


def test_several_calls_at_once(server):
    answer = ask(server, tool_choice="required", tools=[EMPTY], temperature=1.0, seed=3, n=4, max_completion_tokens=150)
    counts = [len(choice.message.tool_calls or ()) for choice in answer.choices]
    assert all(1 <= count <= 16 for count in counts)
    assert max(counts) > 1


def test_allowed_tools(server):
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "look"}}]}}  # fmt: skip
    choice = ask(server, tool_choice=allowed, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["look"]
    free = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed["allowed_tools"]["tools"]}}
    assert ask(server, tool_choice=free, max_completion_tokens=5).choices[0].message.content


def test_names_of_vllms_parsers():
    names = {"granite4": "hermes", "nemotron_v3": "qwen3_coder"} | {form: form for form in FORMS if form != "nemotron"}
    for name, form in names.items():
        assert translate(["--tool-call-parser", name]).words[1] == form
