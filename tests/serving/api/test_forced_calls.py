"""`tool_choice` required, named and allowed: whatever the model would rather do, what comes back is a call."""

import json

import openai
import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.parsing.call_formats import FORMATS
from serving.api.http.parsing.forced_calls import calls_grammar
from serving.api.http.protocol.chat import Tool
from serving.api.http.text import TextCodec
from serving.engine.structured.grammar_state import StructuredOutputs
from serving.engine.structured.grammars import Grammars
from tests.support.written_calls import FORMS, found, tokenizer_with, written

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
TOOLS = [Tool.model_validate(tool) for tool in (ADD, NOW, EMPTY)]
ONE = {form: written(form, ("add", {"a": 1, "kind": "x"})) for form in FORMS}
TWO = {form: written(form, ("add", {"a": 1, "kind": "x"}), ("now", {})) for form in FORMS}


@pytest.fixture(scope="module")
def grammars():
    tokenizer = load_tokenizer("demo")
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 4))


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


def check(name, arguments):
    given = json.loads(arguments)
    if name == "add":
        assert given["a"] <= 99
        assert given["kind"] in ("x", "y")
        assert set(given) <= {"a", "note", "kind", "list"}


@pytest.mark.parametrize("form", [None, *ONE])
def test_a_required_call(server, monkeypatch, form):
    monkeypatch.setitem(server.context.__dict__, "tool_calls", form)
    for seed in range(2):
        choice = ask(
            server, tool_choice="required", parallel_tool_calls=False, temperature=1.0, seed=seed, tools=[ADD, EMPTY]
        ).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("form", [None, *ONE])
def test_a_named_call_in_a_stream(server, monkeypatch, form):
    monkeypatch.setitem(server.context.__dict__, "tool_calls", form)
    named = {"type": "function", "function": {"name": "add"}}
    whole = ask(server, tool_choice=named).choices[0]
    names, arguments, reasons, events = [], "", [], 0
    for chunk in ask(server, tool_choice=named, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                names += [call.function.name] if call.id else []
                arguments += call.function.arguments or ""
                events += 1
    assert (names, reasons) == (["add"], ["tool_calls"])
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert events > 2
    check("add", arguments)


def test_several_calls_at_once(server):
    calls = ask(server, tool_choice="required", tools=[EMPTY], temperature=1.0, seed=3, n=4).choices
    assert all(choice.message.tool_calls for choice in calls)
    assert all(len(choice.message.tool_calls) <= 16 for choice in calls)
    assert max(len(choice.message.tool_calls) for choice in calls) > 1


def test_allowed_tools(server):
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "look"}}]}}  # fmt: skip
    choice = ask(server, tool_choice=allowed, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["look"]
    free = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed["allowed_tools"]["tools"]}}
    assert ask(server, tool_choice=free, max_completion_tokens=5).choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": None}, {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "sub"}}]}}},
        {"tool_choice": {"type": "function"}}, {"tool_choice": {"type": "allowed_tools"}},
    ],
)  # fmt: skip
def test_choices_that_are_none(server, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **fields)
    assert caught.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="cannot be combined"):
        ask(server, tool_choice="required", response_format={"type": "json_object"})


@pytest.mark.parametrize(
    "parameters",
    [{"required": 5}, {"required": [5]}, {"properties": 5}, {"properties": {"a": 5}},
     {"properties": {"a": {"type": "string", "enum": 5}}}],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_schemas_of_wrong_types_are_refused(server, parameters, choice):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, tools=tools, tool_choice=choice, max_completion_tokens=1)
    assert caught.value.param == "tools"
