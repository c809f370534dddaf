"""What a model writes is made well-formed before it is passed on, however it is written."""

import json

import pytest

from serving.api.http.call_pieces import whole_calls
from serving.api.http.json_values import MAX_DEPTH, depth, parse_written, well_formed
from serving.api.http.messages import _arguments
from serving.api.http.protocol.chat import Tool
from serving.api.http.tool_calls import ToolCallReader

DEEP = "[" * 50_000 + "]" * 50_000


def calls(form, text, parameters=None):
    """The calls of a text, whole and a character at a time; both are the same."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    found = []
    for pieces in ([text], text):
        reader, read = ToolCallReader(form, [tool]), []
        for piece in pieces:
            read += reader.push(piece)[1]
        read += reader.push("", last=True)[1]
        made = [(call.function.name, call.function.arguments) for call in whole_calls(read)]
        json.dumps(made, ensure_ascii=False).encode()  # can be sent
        found.append(made)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", [r"\q", r"\ud800", r"a\udfffb", r"\u12"])
@pytest.mark.parametrize("form", ["hermes", "nemotron"])
def test_a_name_with_a_wrong_escape(form, name):
    begin, end = {"hermes": ("<tool_call>", "</tool_call>"), "nemotron": ("<TOOLCALL>[", "]</TOOLCALL>")}[form]
    assert len(calls(form, f'{begin}{{"name": "{name}", "arguments": {{}}}}{end}')) == 1
    calls(form, f'{begin}{{"arguments": {{"a": "{name}"}}, "name": "{name}"}}{end}')


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", r'"\ud800"', DEEP, '{"a":' * 300 + "1" + "}" * 300]
)
def test_values_between_marks_become_json(value):
    text = f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>"
    if value is DEEP:
        text = text.replace(DEEP, DEEP[:2000] + DEEP[-2000:])
    ((_, arguments),) = calls("qwen3_coder", text)

    def refuse(constant):
        raise AssertionError(constant)

    assert "a" in json.loads(arguments, parse_constant=refuse)


@pytest.mark.parametrize(
    "text", [DEEP, '{"a": NaN}', '{"a": 1e999}', '{"a": "\\q"}', "[1]", "{", '{"a":' * 300 + "1" + "}" * 300]
)
def test_arguments_that_cannot_be_told_are_none(text):
    assert _arguments(text) == {}


def test_half_a_surrogate_pair_is_replaced():
    assert _arguments(r'{"a": "\ud800", "b": "\ud83d\ude00"}') == {"a": "\N{REPLACEMENT CHARACTER}", "b": "\U0001f600"}
    assert well_formed("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"
    assert well_formed("\ud83d\ude00") == "\U0001f600"


def test_depth():
    assert depth(b'{"a": [1, {"b": "]]]{{{[[["}]}') == 3
    assert depth(b'["\\\\", [["\\""]]]') == 3
    assert parse_written("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="levels deep"):
        parse_written("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
