"""Calls whose marks are missing, repeated, misspelled or those of another format."""

import json

import pytest

from serving.api.http.parsing.formats import WRAPPERS
from tests.support.servers.written_calls import cut, found, tool_with

F = tool_with({"a": {"type": "string"}, "b": {"type": "integer"}})
X = [("f", {"a": "x"})]
A = "<parameter=a>\nx\n</parameter>\n"
MALFORMED = [
    # Marks that are missing.
    ("qwen3_coder", f"<function=f>\n{A}</function>\n</tool_call>", X, ""),
    ("qwen3_coder", f"So: <function=f>\n{A}</function>\nDone", X, "So: \nDone"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>", X, ""),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</tool_call>", X, ""),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\nx\n<parameter=b>\n5\n</parameter></function></tool_call>",
     [("f", {"a": "x", "b": 5})], ""),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\n5", [("f", {"b": 5})], ""),
    ("hermes", '{"name": "f", "arguments": {"a": "x"}}</tool_call>', X, ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}}\nSo.', X, "\nSo."),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', X, ""),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>', X, ""),
    ("jamba", '[{"name": "f", "arguments": {"a": "x"}}]</tool_calls>', X, ""),
    ("lfm2", "[f(a='x')]<|tool_call_end|>", X, ""),
    ("olmo3", 'f(a="x")</function_calls>', X, ""),
    ("ling3", "f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>", X, ""),
    # Marks that are repeated, or part of a value.
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call></tool_call> So.', X, " So."),
    ("lfm2", "<|tool_call_start|><|tool_call_start|>[f(a='x')]<|tool_call_end|><|tool_call_end|>", X, ""),
    # Syntaxes of other formats, and Python's quotes.
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>', X, ""),
    ("hermes", f"<tool_call><function=f>\n{A}</function></tool_call>", X, ""),
    ("hermes", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>", X, ""),
    ("hermes", '<tool_call>f(a="x")</tool_call>', X, ""),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"x\"'}}</tool_call>",
     [("f", {"a": 'it\'s "x"'})], ""),
    # Other fields, quoted names, the namespace of functions, and JSON between marks of parameters.
    *(("hermes", f"<tool_call>{call}</tool_call>", X, "") for call in (
        '{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}', '{"tool": "f", "args": {"a": "x"}}',
        '{"function": "f", "input": {"a": "x"}}', '{"id": "1", "name": "f", "a": "x"}',
        '{"name": "functions.f", "parameters": {"a": "x"}}')),
    *(("qwen3_coder", f"{before}{call}{after}", X, "") for before, after in (("<tool_call>", "</tool_call>"), ("", ""))
      for call in ('<function=f>\n{"a": "x"}\n</function>', '<function="f"><parameter="a">x</parameter></function>',
                   "<function=functions.f><parameter=a>x</parameter></function>")),
    # Other spellings of marks, and an object as the only argument.
    *(("qwen3_coder", f"<tool_call>{call}</tool_call>{rest}", X, rest) for rest in ("", " So.") for call in (
        f'<function name="f">\n{A}</function>', f'<invoke name="f">\n{A}</invoke>',
        f'<function name="f" id="1">{A}</function>', '<invoke name="f"><parameter name="a">x</parameter></invoke>',
        "<function=f><parameter=a>x</param></function>")),
    ("qwen3_coder", '<invoke name="f">\n<parameter name="a">\nx\n</param>\n</invoke>', X, ""),
    ("olmo3", '<function_calls><invoke name="f"><parameter name="a">x</parameter></invoke></function_calls>', X, ""),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\nx</param> y </invoke> z\n</parameter><parameter=b>"
     "5</param>\n</function></tool_call>", [("f", {"a": "x</param> y </invoke> z", "b": 5})], ""),
    *(("qwen3_coder", f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>",
       [("f", {"a": value})], "") for value in (
        '<function name="g">\n<param name="x">1</param>\n</function>\n<p>2</p>', "<param>1</param></invoke> 2",
        "1</param>\n<parameter=c>2</param> 3")),
    ("lfm2", "[f({'a': 'x'})]<|tool_call_end|>", X, ""),
    *(("lfm2", f"<|tool_call_start|>[f({given})]<|tool_call_end|>", made, "") for given, made in (
        ('{"a": "x"}', X), ('{a: "x"}', X), ("{}", [("f", {})]), ("{'c': 1, 'd': None}", [("f", {"c": 1, "d": None})]),
        ("{'a': 'x'}), f({\"a\": \"x\"}", X * 2), ("{1, 2}", [("f", {"a": "{1, 2}"})]),
        *((f'{{"a": "x"}}, {b}', [("f", {"a": "x", "b": 5})]) for b in ("b=5", "5", "b=5,")), ("{}, a='x'", X),
        ('**{"a": "x"}', X))),
    ("lfm2", '<|tool_call_start|>[f(a="x"]<|tool_call_end|> So.', X, " So."),
    *(("qwen3_coder", f"<tool_call>{call}\n</function></tool_call>", X, "") for call in (
        "<function=f\n<parameter=a>x</parameter>", "<function=f>\n<parameter=a\nx\n</parameter>")),
    ("ling3", '<tool_call>{"name": "f", "arguments": {"a": "x"}}\nfunctions.f:0</tool_call>', X, ""),
    *(("ling3", f'<tool_call>f{space}{{"a": "x"}}</tool_call>', X, "") for space in (" ", "\n")),
    *(("hermes", f'<tool_call>{{"name": "f", "arguments": {none}}}</tool_call>', [("f", {})], "")
      for none in ("null", '""')),
    ("qwen3_coder", '<tool_call><function=f>{"a": "x"}<parameter=b>5</parameter></function></tool_call>',
     [("f", {"a": "x", "b": 5})], ""),
    # Code fences.
    *(("hermes", f"<tool_call>\n```json\n{call}\n```\n</tool_call>{rest}", X * call.count("name"), rest)
      for rest in ("", " `So`")
      for call in ('{"name": "f", "arguments": {"a": "x"}}', '[{"arguments": {"a": "x"}, "name": "f"}]')),
    ("hermes", '<tool_call>```\n{"name": "f", "arguments": {"a": "x"}}\n```', X, ""),
    ("lfm2", "<|tool_call_start|>```python\nf(a='x')\n```<|tool_call_end|>", X, ""),
    ("qwen3_coder", '<tool_call><function=f>\n```json\n{"a": "x"}\n```\n</function></tool_call>', X, ""),
    ("hermes", "<tool_call>```json\nno``` x", [], "<tool_call>```json\nno``` x"),
    # One mark is missing of several.
    *(("ling3", f"<tool_call>f{call}</tool_call>", made, "") for call, made in (
        ("<arg_key>a<arg_value>x</arg_value>", X), ("<arg_key>a</arg_key>x</arg_value>", X),
        ("<arg_key>a</arg_key>\nx", X),
        ("<arg_key>a</arg_key><arg_value>x<arg_key>b</arg_key>5</arg_value>", [("f", {"a": "x", "b": 5})]))),
    *(("kimi_k2", f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>", X, "") for call in (
        'functions.f:0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>',
        '<|tool_call_begin|>functions.f:0 {"a": "x"}<|tool_call_end|>', '<|tool_call_begin|>f\n{"a": "x"}',
        '<|tool_call_begin|>f<|tool_call_argument_begin|>"{\\"a\\": \\"x\\"}"',
        '<|tool_call_begin|>f<|tool_call_argument_begin|>\n```json\n{"a": "x"}\n```<|tool_call_end|>')),
    # Quotes that are not escaped, no arguments, and tags with the names of parameters.
    *(("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {value}, "b": 5}}}}</tool_call>',
       [("f", {"a": read, "b": 5})], "") for value, read in (
        ('"say "hi" now"', 'say "hi" now'), ('"<a href="x">"', '<a href="x">'), ("'it's'", "it's"))),
    ("hermes", '<tool_call>{"arguments": {"a": "x "y" z"}, "name": "f"}</tool_call>', [("f", {"a": 'x "y" z'})], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>', [("f", {})], ""),
    *(("qwen3_coder", f"<tool_call><function=f>\n<a>{value}</function></tool_call>", [("f", {"a": "x", **more})], "")
      for value, more in (("x</a>", {}), ("\nx\n</a>\n<b>5</b>\n", {"b": 5}), ("x", {}), ("x</a><c>1</c>", {}))),
    # Parameters, names and marks as models of other families write them, and end marks within values.
    *(("qwen3_coder", f"<tool_call>{call}</tool_call>", X, "") for call in (
        "f\n<parameter=a>x</parameter></function>", '{"name": "default_api.f", "kwargs": {"a": "x"}}',
        "<function=f><arg_key>a</arg_key><arg_value>x</arg_value></function>",
        '{"tool_name": "f()", "tool_args": {"a": "x"}}', f"<function=functions/f>{A}</parameter></function>")),
    *(("qwen3_coder", f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call> So.",
       [("f", {"a": value})], " So.") for value in (
        "</parameter> is a mark", f"<tool_call>\n<function=g>\n{A}</function>\n</tool_call>")),
    ("qwen3_coder", f"<tool_call><function=f>{A}So: <parameter=b>5</parameter></function></tool_call> So</parameter>",
     [("f", {"a": "x", "b": 5})], " So</parameter>"),
    *(("nemotron", f"{begin}\n{call}\n{end} So.", X, " So.") for begin, end in WRAPPERS.items()
      for call in (f"<function=f>\n{A}</function>", '{"name": "f", "arguments": {"a": "x"}}')),
    ("lfm2", "<|tool_call_start|><tool_call>[f(a: 'x'), f('a': 'x')]</tool_call><|tool_call_end|>", X * 2, ""),
    *(("ling3", f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</tool_call>", [("f", {"a": made})], "")
      for value, made in (("x</arg_key>", "x"), ("a </arg_value> b</arg_value>", "a </arg_value> b"))),
    *(("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\n<|tool_call_argument_begin|>\n{"
       f"{given}<|tool_calls_section_end|>", X, "") for given in ('"a": "x"', '"a": "x"}\n<|tool_call_end|>\n')),
    *(("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{value}"}}}}</tool_call>', [("f", {"a": value})], "")
      for value in ('say "hi" now', 'say "hi", ok', 'say "hi"')),
    # Items of Python and comments after a text, and a superfluous sign.
    *(("lfm2", f'<|tool_call_start|>[f(a=["s", {item}], b=5)]<|tool_call_end|> So.',
       [("f", {"a": ["s", *made], "b": 5})], " So.") for item, made in (
        ("(1, 2)", [[1, 2]]), ("dict(x=1)", ["dict", ["x=1"]]), ('r"t"', ["r", "t"]), ('# c\n "t"', ["#", "c", "t"]))),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x",\n // comment\n "b": 5}}</tool_call>',
     [("f", {"a": "x", "//": "comment", "b": 5})], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x";}}</tool_call>\n<tool_call>{"name": "f", "arguments": '
     '{"a": "x"}}</tool_call>', X * 2, ""),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', [],
     '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    # What only resembles a call.
    *((form, text, [], text) for form in ("lfm2", "qwen3_coder") for text in (
        "The <tools> are <function_call>.", '<tool_calls>[{"name": "g", "arguments": {}}]</tool_calls>')),
    ("qwen3_coder", f"<function=g>\n{A}</function>", [], f"<function=g>\n{A}</function>"),
    ("qwen3_coder", "Write `<tool_call>` and <function= first.", [], "Write `<tool_call>` and <function= first."),
    ("lfm2", "[f(a='x')] is Python", [], "[f(a='x')] is Python"),
    ("olmo3", "f(1) is 2", [], "f(1) is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "calls", "rest"), MALFORMED)
def test_calls_with_wrong_marks(form, text, calls, rest):
    for size in (1, 3, 1000):
        shown, made = found(form, cut(text, size), [F])
        assert (shown, [(name, json.loads(arguments)) for name, arguments in made]) == (rest, calls)
