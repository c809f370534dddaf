"""The formats in which models write tool calls, as defined by their chat templates, and grammars of forced calls.

docs/operations.md shows each format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from checkpoints.tokenizer import Tokenizer
from serving.api.http.parsing.json_schemas import enforceable
from serving.api.http.parsing.structural_tags import in_slashes
from serving.api.http.parsing.text_cursor import SPACE, Head
from serving.api.http.protocol.chat import Tool
from serving.api.http.protocol.common import OF_GRAMMAR
from serving.api.http.settings import ToolCallForm

MOST_CALLS = 16
"""Maximum number of calls in one answer."""
_LONGEST = 1000
"""Largest `maxLength` that a grammar enforces; larger ones would need too many grammar states."""
_WITHIN = ("$defs", "definitions")
"""Definitions that the parts of a schema may refer to."""
_ID = re.compile(r"(?:functions\.)?(.+?)(:\d{1,9})?", re.DOTALL)


@dataclass(frozen=True)
class CallSyntax:
    """How models write a call between the marks of a format."""

    heads: tuple[Head, ...]
    """The beginning of a call, in the usual spellings; the first one is used in forced calls."""
    end: str = ""
    """The mark after a call; "" if only the mark after all calls ends it."""
    parameter: Head | None = None
    """The beginning of a parameter; None if the arguments are a JSON object."""
    value_end: str = ""
    """The mark after a value, which is text; "" if values are Python literals."""
    padding: str = ""
    """Text before and after each value."""
    between: str = SPACE + ","
    """Letters without meaning between arguments."""
    tagged: bool = False
    """The name is a tag that is also the call's id, because models expect it in later turns."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of a tagged call."""
        head = self.heads[0]
        return (head.before, head.after.strip(), self.end) if self.tagged else ()

    def named(self, written: str) -> tuple[str, str | None]:
        """Returns a call's name, and its id if it has one."""
        name = written.strip()
        matched = _ID.fullmatch(name) if self.tagged else None
        if matched is None:
            return name, None
        return matched[1], f"functions.{matched[1]}{matched[2]}" if matched[2] else None


_JSON_NAME = r'[^"\\]{1,256}'
JSON = CallSyntax(tuple(
    Head('{ "name" : "', f'" , "{word}" : ', name=_JSON_NAME, ahead=r"(?=\{)") for word in ("arguments", "parameters")
))  # fmt: skip
"""`{"name": ..., "arguments": {...}}`, or a list of such objects. The fields may also have another order."""
TAGGED = CallSyntax(
    (Head("<|tool_call_begin|>", "<|tool_call_argument_begin|> ", ahead=r"(?=\S)"),), "<|tool_call_end|>", tagged=True
)  # fmt: skip
FUNCTION = CallSyntax(
    (Head("<function=", ">"),), "</function>", Head("<parameter=", ">"), "</parameter>", padding="\n"
)  # fmt: skip
"""`<function=name>`, then `<parameter=key>`, a value and `</parameter>` on separate lines, then `</function>`."""
ARGUMENT = CallSyntax(
    (Head("", " ", name=r"[\w.\-]{1,256}", ahead="(?=<)"),),
    parameter=Head("<arg_key>", "</arg_key> <arg_value>"), value_end="</arg_value>",
)  # fmt: skip
PYTHON = CallSyntax(
    (Head("", " (", name=r"[A-Za-z_][\w.\-]{0,255}"),), ")", Head("", " =", name=r"[\w.\-]{1,256}")
)  # fmt: skip
"""`name(key="text", other=[1, None])`. Arguments without a name get the names of the tool's parameters, in order."""
SYNTAXES = (JSON, FUNCTION, TAGGED, ARGUMENT, PYTHON)


@dataclass(frozen=True)
class CallFormat:
    """One format."""

    begin: str
    """The mark before calls."""
    end: str
    """The mark after calls."""
    syntax: CallSyntax = JSON
    sign: str = ""
    """Text that identifies the format in a chat template; `begin` if empty."""
    ends_reasoning: bool = False
    """The mark `begin` also ends reasoning: models may write it without the end mark of their reasoning."""
    around: tuple[str, str] = ("\n", "\n")
    """Text between the marks and a call, in forced calls."""
    between: str | None = None
    """Text between forced calls; None if each call has its own marks."""

    @property
    def marks(self) -> list[str]:
        """All marks of the format, each of which may be a special token of the model."""
        return [self.begin, self.end, *self.syntax.marks]


FORMATS: Mapping[ToolCallForm, CallFormat] = MappingProxyType({
    "nemotron": CallFormat("<TOOLCALL>", "</TOOLCALL>", around=("[", "]"), between=", "),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", FUNCTION, sign="<function="),
    "ling3": CallFormat(
        "<tool_call>", "</tool_call>", ARGUMENT, sign="<arg_key>", ends_reasoning=True, around=("", "")
    ),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", TAGGED, ends_reasoning=True, around=("", ""),
        between="",
    ),
    "lfm2": CallFormat("<|tool_call_start|>", "<|tool_call_end|>", PYTHON, around=("[", "]"), between=", "),
    "olmo3": CallFormat("<function_calls>", "</function_calls>", PYTHON, around=("", ""), between="\n"),
    "jamba": CallFormat("<tool_calls>", "</tool_calls>", around=("[", "]"), between=", "),
    "hermes": CallFormat("<tool_call>", "</tool_call>"),
})  # fmt: skip
"""Formats by name. If a chat template contains the signs of several formats, the first one counts."""


def form_of(tokenizer: Tokenizer | None) -> ToolCallForm | None:
    """Returns the format in the model's chat template, otherwise a format with a mark that is a token; None if there
    is neither."""
    if tokenizer is None:
        return None
    signs = {name: form.sign or form.begin for name, form in FORMATS.items()}
    in_template = (name for name, sign in signs.items() if tokenizer.chat_template_mentions(sign))
    as_token = (name for name, sign in signs.items() if "|" in sign and tokenizer.token_to_id(sign) is not None)
    return next(in_template, None) or next(as_token, None)


def calls_grammar(
    form: ToolCallForm,
    tools: Sequence[Tool],
    *,
    parallel: bool,
    token_ids: Mapping[str, int] | None = None,
    answer: Any = None,
) -> str:
    """Returns a grammar, in Lark's syntax, of an answer that calls one of the tools, or several if `parallel`.

    Arguments follow the tools' schemas. `token_ids` contains the format's marks that are special
    tokens of the model; a grammar cannot contain these as text. `answer`: the schema of JSON that the answer may be
    instead; None if it must call.
    """
    style, ids = FORMATS[form], token_ids or {}

    def mark(text: str) -> str:
        return f"<[{ids[text]}]>" if text in ids else _text(text)

    functions = " | ".join(f"function_{i}" for i in range(len(tools)))
    calls = "start" if answer is None else "calls"
    rules = [f"function: {functions}"]
    if answer is not None:
        rules += ["start: calls | answer", _json("answer", answer)]
    before, after = style.around
    whole = style.between is None  # each call has its own marks
    one, between = ("call", "\n") if whole else ("function", style.between or "")
    several = f"{one} ({_row(_text(between), one)}){{0,{MOST_CALLS - 1}}}" if parallel else one
    around = _row(mark(style.begin), _text(before), "function" if whole else several, _text(after), mark(style.end))
    rules.append(f"{'call' if whole else calls}: {around}")
    if whole:
        rules.append(f"{calls}: {several}")
    for i, tool in enumerate(tools):
        rule, name, schema = f"function_{i}", tool.function.name, tool.function.parameters or {"type": "object"}
        if style.syntax.parameter is not None:
            rules += (_marked if style.syntax.value_end else _pythonic)(rule, name, schema, style.syntax)
            continue
        if style.syntax.tagged:
            begin, arguments, end = map(mark, style.syntax.marks)
            head = f"{begin} {_text(f'functions.{name}:')} /[0-9]{{1,3}}/ {arguments}"
        else:
            head, end = _text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '), _text("}")
        rules += [f"{rule}: {head} {rule}_arguments {end}", _json(f"{rule}_arguments", schema)]
    return "\n".join(rules)


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Returns each parameter's name, its schema with the definitions, and whether it is required."""
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else ()
    within = {key: schema[key] for key in _WITHIN if key in schema}
    return [
        (key, {**within, **value} if isinstance(value, Mapping) else value, key in required)
        for key, value in (properties.items() if isinstance(properties, Mapping) else ())
    ]


def _marked(rule: str, name: str, schema: Mapping[str, Any], syntax: CallSyntax) -> list[str]:
    parts, rules, padding, head = [], list[str](), syntax.padding, syntax.parameter
    assert head is not None
    for i, (key, value, required) in enumerate(_properties(schema)):
        parts.append(f"{rule}_{i}" + ("" if required else "?"))
        begin, end = f"{head.write(key)}{padding}", f"{padding}{syntax.value_end}{padding}"
        rules += _parameter(f"{rule}_{i}", begin, end, value)
    begin = _text(syntax.heads[0].write(name) + padding)
    return [f"{rule}: {_row(begin, *parts, _text(syntax.end))}", *rules]


def _parameter(rule: str, begin: str, end: str, schema: Any) -> list[str]:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return [f"{rule}: {_text(begin)} ({' | '.join(map(_text, choices))}) {_text(end)}"]
        pattern, grammar = str(schema.get("pattern")), schema.get(OF_GRAMMAR)
        form = f"%lark {{\n{grammar}\n}}" if isinstance(grammar, str) else None
        if pattern.startswith("^(?:") and pattern.endswith(")$"):
            form = f"/{in_slashes(pattern[1:-1])}/"
        if form is not None:
            return [f"{rule}: {_text(begin)} {rule}_value {_text(end)}", f"{rule}_value: {form}"]
        most = schema.get("maxLength")
        letters = f".{{0,{most}}}" if isinstance(most, int) and 0 <= most <= _LONGEST else ".*"
        return [f"{rule}: {_text(begin)} {rule}_value", f"{rule}_value[suffix={_text(end)}]: /(?s:{letters})/"]
    return [f"{rule}: {_text(begin)} {rule}_value {_text(end)}", _json(f"{rule}_value", schema)]


def _pythonic(rule: str, name: str, schema: Mapping[str, Any], _: CallSyntax) -> list[str]:
    """Returns the rules for named arguments in the schema's order, as JSON literals separated by commas."""
    properties = _properties(schema)
    rules = [f"{rule}: {_text(name + '(')} {rule}_first_0"]
    for i, (key, value, required) in enumerate(properties):
        for place, comma in (("first", ""), ("next", ", ")):
            present = f"{_text(f'{comma}{key}=')} {rule}_{i} {rule}_next_{i + 1}"
            absent = "" if required else f" | {rule}_{place}_{i + 1}"
            rules.append(f"{rule}_{place}_{i}: {present}{absent}")
        rules.append(_json(f"{rule}_{i}", value))
    return [*rules, *(f"{rule}_{place}_{len(properties)}: {_text(')')}" for place in ("first", "next"))]


def _json(rule: str, schema: Any) -> str:
    return f"{rule}: %json {_schema(schema)}"


def _schema(schema: Any) -> str:
    """Returns the schema with at most one space between its parts, because models may otherwise write only spaces."""
    if isinstance(schema, Mapping):
        schema = {"x-guidance": {"whitespace_pattern": " ?", "coerce_one_of": True}, **enforceable(schema)}
    return json.dumps(schema)


def _row(*parts: str) -> str:
    """Returns a sequence of `parts`, without empty texts."""
    return " ".join(part for part in parts if part != _text(""))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
