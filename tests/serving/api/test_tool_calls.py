"""Calls of tools in what a model has written: found whole and in pieces, and told as OpenAI's API does."""

import json
import time
from pathlib import Path
from random import Random

import pytest
import yaml

from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.answer_pieces import whole_calls
from serving.api.http.parsing.formats import FORMATS, THINK, form_of
from serving.api.http.protocol.chat import Tool
from tests.support.selection import slow
from tests.support.servers.written_calls import FORMS, cut, found, tokenizer_with, tool_with, written

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}},
}
ONE = ("add", {"a": 1, "note": "1"})
WRITTEN = {form: written(form, ONE) for form in FORMS}

each_form = pytest.mark.parametrize("form", FORMS)


def told(form, pieces, **options):
    """The text that is shown, and the calls with their arguments as values."""
    shown, calls = found(form, pieces, [TOOL], **options)
    return shown, [(name, json.loads(arguments)) for name, arguments in calls]


@each_form
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_are_found_however_the_text_is_cut(form, size):
    text = f"I look <b>it</b> up.\n{WRITTEN[form]}\n{WRITTEN[form]}\n"
    assert told(form, cut(text, size)) == ("I look <b>it</b> up.", [ONE, ONE])
    reader, shown = AnswerReader(form, [Tool.model_validate(TOOL)]), ""
    for piece in cut(text, size):  # no part of a mark is shown
        shown += reader.push(piece).of("text")
        assert not any(mark in shown.lower() for mark in ("<t", "<|", "<f"))


ODD = yaml.safe_load(Path(__file__).with_name("odd_calls.yaml").read_text())


@pytest.mark.parametrize(("form", "text", "calls"), [(form, *case) for form, cases in ODD.items() for case in cases])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_odd_calls_are_read_too(form, text, calls, size):
    assert told(form, cut(text, size)) == ("", [tuple(call) for call in calls])


def arguments_of(form, text, tool):
    """The arguments of the only call, which are the same however the text is cut."""
    ((arguments,),) = {tuple(given for _, given in found(form, cut(text, n), [tool])[1]) for n in (1, 3, 1000)}
    return json.loads(arguments)


F = tool_with({"a": {"type": "string"}, "b": {"type": "integer"}})
BETWEEN_MARKS = "<tool_call><function=f><parameter=z>\n{}\n</parameter></function></tool_call>"
STRING = {"type": "string"}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "94103", "94103"), (OPTIONAL, "null", None), (OPTIONAL, "nullable", "nullable"),
        ({"$ref": "#/$defs/s"}, "true", "true"), ({"oneOf": [STRING]}, "[1]", "[1]"), ({"enum": ["007"]}, "007", "007"),
        ({"type": ["string", "integer"]}, "5", 5), ({"anyOf": [{"type": "integer"}]}, "5", 5),
        ({"const": "1"}, "1", "1"), ({"$ref": "#/properties/z"}, "1", 1), ({"anyOf": True, "enum": []}, "5", 5),
        ({"anyOf": [{"$ref": "#/properties/z"}] * 5000}, "1", 1),
    ],
)  # fmt: skip
def test_the_whole_schema_determines_the_type(schema, text, value):
    tool = tool_with({"z": schema}, **{"$defs": {"s": STRING}})
    assert arguments_of("qwen3_coder", BETWEEN_MARKS.format(text), tool) == {"z": value}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "{1,2}", "{1,2}"), ({}, "{1,2} ", "{1,2}"), (STRING, '{"b": 1}', '{"b": 1}'), (STRING, "{}", "{}"),
        ({"type": "object"}, "{'b': {1: (2,)}, }", {"b": {"1": [2]}}), ({}, "{}", {}),
        ({}, "{1: 2, 3}", {"1": 2, "3": None}), ({"type": "object"}, "{x (y)}", "{x (y)}"),
    ],
)  # fmt: skip
def test_braces_are_an_object_only_with_keys(schema, text, value):
    tool = tool_with({"z": schema})
    assert arguments_of("lfm2", f"<|tool_call_start|>[f(z={text}, a=1)]<|tool_call_end|>", tool) == {"z": value, "a": 1}
    assert text[:3] == "{1:" or arguments_of("qwen3_coder", BETWEEN_MARKS.format(text), tool)["z"] in (value, text)


@pytest.mark.parametrize(("written_as", "value"), [
    ('{"b": 5}, set={"c": 1}', {"first": {"b": 5}, "set": {"c": 1}}),
    ('{"set": 5}, set={"c": 1}', {"first": {"set": 5}, "set": {"c": 1}}),
    ('{"first": {"b": 5}, "set": {}}', {"first": {"b": 5}, "set": {}}),
])  # fmt: skip
def test_a_first_argument_that_is_an_object(written_as, value):
    tool = tool_with({"first": {"type": "object"}, "set": {"type": "object"}})
    assert arguments_of("lfm2", f"<|tool_call_start|>[f({written_as})]<|tool_call_end|>", tool) == value


def test_a_call_ends_the_reasoning():
    call = written("hermes", ("f", {"a": "x"}))
    for size in (1, 3, 1000):
        options = {"marks": THINK, "begun": True}
        assert found("hermes", cut(f"so {call}\n</think>\n\nHi", size), [F], **options) == ("Hi", [("f", '{"a": "x"}')])
        assert found("hermes", cut(f"so <tool_call>{{</think> {call}", size), [F], **options)[1]
        assert found("hermes", cut("so <tool_call> x</think> Hi ", size), [F], **options) == ("Hi ", [])


@each_form
def test_calls_that_are_cut_off_limited_or_followed_by_text(form):
    reader = AnswerReader(form, [Tool.model_validate(TOOL)])
    pieces = [piece for letter in WRITTEN[form] for piece in reader.push(letter).calls]
    assert [bool(piece.function.name) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 4  # the arguments come piece by piece
    assert told(form, [WRITTEN[form] * 3], most=1)[1] == [ONE]
    assert told(form, [WRITTEN[form].removesuffix(FORMATS[form].end)])[1] == [ONE]
    assert told(form, [f"{WRITTEN[form]} So."]) == (" So.", [ONE])


@each_form
@pytest.mark.parametrize(
    "text",
    ["<tool_call>{</tool_call> ", "<TOOLCALL>[1]</TOOLCALL>", "a < b\n", '{"name": 1}', "<tool_",
     "It supports <function=add> too.\nDone"],
)  # fmt: skip
def test_what_is_no_call_stays_text(form, text):
    for size in (1, 1000):
        assert told(form, cut(text, size)) == (text, [])


@each_form
@pytest.mark.parametrize("size", [1, 1000])
def test_a_forced_call_that_is_cut_off_shows_no_mark(form, size):
    """Wherever the output ends, the text of a forced call is none of the answer's content."""
    for end in range(len(WRITTEN[form])):
        shown, _ = found(form, cut(WRITTEN[form][:end], size), [TOOL], forced=True)
        assert shown.strip() == "", end


def test_the_form_is_that_of_the_chat_template_or_of_a_token():
    def of(template, *marks):
        return form_of(tokenizer_with(*marks, template=template))

    assert set(FORMS) == set(FORMATS)
    assert of("{{ '<TOOLCALL>' }}") == "nemotron"
    assert of("<tool_call>\n<function=x>") == "qwen3_coder"
    assert of("<tool_call>{{ tool | tojson }}</tool_call>") == "hermes"
    for form, style in FORMATS.items():
        assert of(f"<|im_start|>{style.begin} {style.sign}") == form
    assert of("{{ messages }}") is form_of(None) is None
    assert of("{{ messages }}", "<|tool_call_start|>") == "lfm2"
    assert of("<tool_call>", "<|tool_call_start|>") == "hermes"


def test_ids_that_a_model_writes_are_kept_and_never_repeated():
    one = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    tags = ("functions.add:3", "functions.add:3", "add", "functions.add:4")
    text = f"<|tool_calls_section_begin|>{''.join(map(one.format, tags))}<|tool_calls_section_end|>"
    calls = whole_calls(AnswerReader("kimi_k2", []).push(text, last=True).calls)
    assert [call.function.name for call in calls] == ["add"] * 4
    assert (calls[0].id, calls[3].id) == ("functions.add:3", "functions.add:4")
    assert len({call.id for call in calls}) == 4


@pytest.mark.smoke
@each_form
def test_long_texts_take_time_in_proportion(form):
    """A call, and then text that is none; before, each of its characters was a copy of the rest."""
    begin, end = FORMATS[form].begin, FORMATS[form].end
    call = WRITTEN[form].removesuffix(end)
    wrong = (begin + "x") * 10_000, call + '"' * 30_000, (begin + "{") * 2_000
    for text in (call + "x (" * 30_000 + end, call + end + begin + "x:" * 30_000, *wrong):
        started = time.process_time()
        found(form, [text], [TOOL])
        assert time.process_time() - started < 20
    pieces = begin, '{"name": "add", "arguments": {"note": "a",', " " * 4000, *"x" * 3800
    started = time.process_time()
    found(form, pieces, [TOOL])
    assert time.process_time() - started < 20


PARTS = (
    *"\"'\\{}[](),:= \n",
    *("\\n", "\\u00e9", "\\ud83d", "\\ude00", '"""', "</", "<|", "add", "add(", 'note="', "a=1, ", "NaN", "07", "é"),
    *("</function>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.add:0"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=add>", "<parameter=note>", "</parameter>"),
    *('<function name="add">', '<invoke name="add">', "</invoke>", '<parameter name="a">', "</param>"),
    *("```json\n", "```", 'add({"a": 1', "functions.add:0 {", "<arg_key>a"),
    *('{"name": "add", "arguments": {', '"a": 1', "\N{GRINNING FACE}"),
)


def mutated(random, text, parts):
    """The text with a few parts removed, repeated or inserted."""
    for _ in range(random.randrange(4)):
        at, size = random.randrange(len(text) + 1), random.randrange(1, 12)
        middle = random.choice(["", text[at : at + size] * 2, random.choice(parts) + text[at : at + size]])
        text = text[:at] + middle + text[at + size :]
    return text


@pytest.mark.parametrize("texts", [40, pytest.param(100, marks=pytest.mark.full), slow(10_000)])
@each_form
def test_hostile_texts_are_read_alike_however_they_are_cut(form, texts):
    style, random = FORMATS[form], Random(form)
    parts = [*PARTS, style.begin, style.end, "</think>", *WRITTEN.values()]
    for i in range(texts):
        text = style.begin + "".join(random.choices(parts, k=random.randrange(25)))
        if i % 2:
            text = mutated(random, random.choice([*WRITTEN.values()]) + random.choice(["", "\n", WRITTEN[form]]), parts)
        at, size = random.randrange(len(text) + 1), random.randrange(2, 9)
        ways = ([text], list(text), [text[:at], text[at:]], cut(text, size))
        options = {"marks": THINK, "begun": True} if i % 5 == 0 else {}
        first, *others = (found(form, pieces, [TOOL], **options) for pieces in ways)
        assert all(other == first for other in others), text
        assert json.dumps(first, ensure_ascii=False).encode()
        for _, arguments in first[1]:
            json.loads(arguments, parse_constant=pytest.fail)


@pytest.mark.parametrize("form", ["lfm2", "olmo3"])
@pytest.mark.parametrize(
    "arguments",
    ['note="a, \\u00e9\\\\', "note='it's'", "x=[1, (2", "x={'a': \"", 'a=1, note="""a"" b', "x=\\", "note=",
     '{"a": 1}', '{"a": 1}, '],
)  # fmt: skip
def test_a_call_that_is_cut_off_has_no_whole_arguments(form, arguments):
    """So that clients do not take them for what the model meant."""
    text = f"{FORMATS[form].begin}add({arguments}"
    ((_, read),) = found(form, [text], [TOOL], cut=True)[1]
    assert found(form, text, [TOOL], cut=True)[1] == [("add", read)]
    with pytest.raises(ValueError, match=r"."):
        json.loads(read)
