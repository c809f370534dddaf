"""What a model writes is made well-formed before it is passed on, however it is written."""

import json
import random

import pytest

from serving.api.http.json_values import MAX_DEPTH, depth, parse_written, well_formed
from serving.api.http.parsing.written_json import WrittenObject, object_of
from tests.support.servers.written_calls import found

DEEP = "[" * 50_000 + "]" * 50_000


def calls(form, text):
    """The calls of a text, whole and a character at a time; both are the same."""
    tool = {"type": "function", "function": {"name": "f"}}
    _, made = found(form, [text], [tool])
    json.dumps(made, ensure_ascii=False).encode()  # can be sent
    assert found(form, text, [tool])[1] == made
    return made


def strictly(text):
    """The value of a text that is JSON, without the constants that Python's parser takes too."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", [r"\q", r"\ud800", r"a\udfffb", r"\u12"])
@pytest.mark.parametrize("form", ["hermes", "nemotron"])
def test_a_name_with_a_wrong_escape(form, name):
    begin, end = MARKS[form]
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
    assert "a" in strictly(arguments)


MARKS = {"hermes": ("<tool_call>", "</tool_call>"), "nemotron": ("<TOOLCALL>[", "]</TOOLCALL>")}
REPAIRED = {
    '{"a": NaN, "b": [-Infinity, 1]}': {"a": "NaN", "b": ["-Infinity", 1]},
    '{"a": 1e999, "b": 01, "c": 1_0}': {"a": "1e999", "b": "01", "c": "1_0"},
    '{"a": True, "b": None}': {"a": True, "b": None},
    r'{"a": "\q\u12", "b": "\ud800", "c": "\udc00\ud83d\ude00"}': {
        "a": r"\q\u12", "b": "\N{REPLACEMENT CHARACTER}", "c": "\N{REPLACEMENT CHARACTER}\U0001f600"
    },
    r"""{"a": '\'\x27\47', "b": "\x22\42"}""": {"a": r"'\x27\47", "b": r"\x22\42"},
    '{"a": "x\ny\x00"}': {"a": "x\ny\x00"},
    '{"a": 1,, "b": [1, 2,],}': {"a": 1, "b": [1, 2]},
    '{a: b "c" 1 "d": }': {"a": "b", "c": 1, "d": None},
    '{"a": [1, {"b": 2], "c": 3}': {"a": [1, {"b": 2}], "c": 3},
    '{"a": 1]}': {"a": 1},
    '{{"a": 1}, [2]}': {"": [2]},
    '{"a"}': {"a": None},
    '{"a": <b>, "c": 1 < 2}': None,
    '{"a": ' + "9" * 5000 + "}": {"a": "9" * 5000},
    '{"a": ' + DEEP[:1000] + DEEP[-1000:] + "}": None,
}  # fmt: skip
"""What a model writes as an object, and what the client gets; None: any valid object."""


@pytest.mark.parametrize("form", MARKS)
@pytest.mark.parametrize("text", REPAIRED)
def test_arguments_that_are_not_json_become_json(form, text):
    begin, end = MARKS[form]
    for whole in (f'{{"name": "f", "arguments": {text}}}', f'{{"arguments": {text}, "name": "f"}}'):
        ((name, arguments),) = calls(form, f"{begin}{whole}{end}")
        value = strictly(arguments)
        assert name == "f"
        assert isinstance(value, dict) if REPAIRED[text] is None else value == REPAIRED[text]
        assert depth(arguments.encode()) <= MAX_DEPTH
        assert (object_of(arguments) or {}) == value


@pytest.mark.parametrize("form", MARKS)
def test_arguments_that_the_closing_mark_cuts_off_are_closed(form):
    begin, end = MARKS[form]
    ((_, arguments),) = calls(form, f'{begin}{{"name": "f", "arguments": {{"a": [1, {{"b": 2, {end.strip("]")}')
    assert strictly(arguments) == {"a": [1, {"b": 2}]}


def test_any_text_after_a_bracket_becomes_valid_json():
    pick = random.Random(7)
    parts = ['"', '"a"', ":", ",", "{", "}", "[", "]", " ", "1", "-", ".5", "e9", "NaN", "true", "\\", "u", "d83d",
             "\\udc00", "<", "</t>", "\n", "\t", "\x01", "\ud800", "é", "\xa0"]  # fmt: skip
    for _ in range(3000):
        text = "{" + "".join(pick.choices(parts, k=pick.randrange(24)))
        whole = text + '"}"}' + "]}" * 12
        ways = []
        for cuts in ([whole], whole):
            written, valid, left, complete = WrittenObject("</t>"), "", "", False
            for piece in cuts:
                left += piece
                read, more, complete = written.push(left)
                valid, left = valid + more, left[read:]
                if complete:
                    break
            ways.append((valid, complete))
        assert ways[0] == ways[1], whole
        if complete:
            assert isinstance(strictly(valid), dict), whole
    # Valid JSON passes unchanged.
    text = '{ "a" : [1, -2.5e3 ,true,null, "x\\u00e9\\n\\ud83d\\ude00"],\n"b":{} ,"c":[ ],"d":[[{"e":""}]] }'
    assert WrittenObject().push(text + "rest") == (len(text), text, True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (DEEP, {}), ("[1]", {}), ("{", {}), ("", {}), ('{"a": NaN}', {"a": "NaN"}), ('{"a": 1e999}', {"a": "1e999"}),
        ('{"a": "\\q"}', {"a": "\\q"}), ('{"a": "x', {"a": "x"}), ('{"a": [1, {"b": ', {"a": [1, {"b": None}]}),
        (r'{"a": "\ud800", "b": "\ud83d\ude00"}', {"a": "\N{REPLACEMENT CHARACTER}", "b": "\U0001f600"}),
    ],
)  # fmt: skip
def test_arguments_are_told_as_far_as_they_were_written(text, value):
    assert (object_of(text, cut=True) or {}) == value


def test_depth():
    assert [well_formed(text) for text in ("\ud800b", "\ud83d\ude00")] == ["\N{REPLACEMENT CHARACTER}b", "\U0001f600"]
    assert depth(b'{"a": [1, {"b": "]]]{{{[[["}]}') == 3
    assert depth(b'["\\\\", [["\\""]]]') == 3
    assert parse_written("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="levels deep"):
        parse_written("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
