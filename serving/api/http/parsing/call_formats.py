"""The formats in which models write tool calls, as defined by their chat templates, and grammars of forced calls.

| format | a call looks like | for example |
|---|---|---|
| `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Granite 4, Qwen3-Next |
| `jamba` | `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>` | Jamba |
| `kimi_k2` | `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` | Kimi |
| `lfm2` | `<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>` | LFM2 |
| `ling3` | `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>` | Ling 3 |
| `nemotron` | `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>` | Nemotron Nano v2 |
| `olmo3` | `<function_calls>name(key="value")</function_calls>`, one call per line | OLMo 3, OLMo Hybrid |
| `qwen3_coder` | `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` | Nemotron 3 |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from checkpoints.tokenizer import Tokenizer
from serving.api.http.parsing.json_calls import ARGUMENTS, CALL, CALL_END
from serving.api.http.parsing.marked_calls import ARGUMENT_MARKUP, FUNCTION_MARKUP, CallMarkup
from serving.api.http.protocol.chat import Tool
from serving.api.http.settings import ToolCallForm

MOST_CALLS = 16
"""Maximum number of calls in one answer."""
_LONGEST = 1000
"""Largest `maxLength` that a grammar enforces; larger ones would need too many grammar states."""
_WITHIN = ("$defs", "definitions")
"""Definitions that the parts of a schema may refer to."""


@dataclass(frozen=True)
class CallFormat:
    """One format."""

    begin: str
    """The mark before calls."""
    end: str
    """The mark after calls."""
    syntax: Literal["json", "marked", "pythonic", "tagged"] = "json"
    """Syntax of the text between the marks."""
    markup: CallMarkup | None = None
    """Marks of the syntax `marked`."""
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
        return [self.begin, self.end, *((CALL, ARGUMENTS, CALL_END) if self.syntax == "tagged" else ())]


FORMATS: Mapping[ToolCallForm, CallFormat] = MappingProxyType({
    "nemotron": CallFormat("<TOOLCALL>", "</TOOLCALL>", around=("[", "]"), between=", "),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", "marked", FUNCTION_MARKUP, sign="<function="),
    "ling3": CallFormat(
        "<tool_call>", "</tool_call>", "marked", ARGUMENT_MARKUP, sign="<arg_key>", ends_reasoning=True, around=("", "")
    ),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "tagged", ends_reasoning=True, around=("", ""),
        between="",
    ),
    "lfm2": CallFormat("<|tool_call_start|>", "<|tool_call_end|>", "pythonic", around=("[", "]"), between=", "),
    "olmo3": CallFormat("<function_calls>", "</function_calls>", "pythonic", around=("", ""), between="\n"),
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
    form: ToolCallForm, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int] | None = None
) -> str:
    """Returns a grammar, in Lark's syntax, of an answer that calls one of the tools, or several if `parallel`.

    Arguments follow the tools' schemas. `token_ids` contains the format's marks that are special
    tokens of the model; a grammar cannot contain these as text.
    """
    style, ids = FORMATS[form], token_ids or {}

    def mark(text: str) -> str:
        return f"<[{ids[text]}]>" if text in ids else _text(text)

    functions = " | ".join(f"function_{i}" for i in range(len(tools)))
    rules = [f"function: {functions}"]
    before, after = style.around
    whole = style.between is None  # each call has its own marks
    one, between = ("call", "\n") if whole else ("function", style.between or "")
    several = f"{one} ({_row(_text(between), one)}){{0,{MOST_CALLS - 1}}}" if parallel else one
    around = _row(mark(style.begin), _text(before), "function" if whole else several, _text(after), mark(style.end))
    rules.append(f"{'call' if whole else 'start'}: {around}")
    if whole:
        rules.append(f"start: {several}")
    for i, tool in enumerate(tools):
        rule, name, schema = f"function_{i}", tool.function.name, tool.function.parameters or {"type": "object"}
        match style.syntax:
            case "marked":
                assert style.markup is not None
                rules += _marked(rule, name, schema, style.markup)
            case "pythonic":
                rules += _pythonic(rule, name, schema)
            case "tagged":
                head = f"{mark(CALL)} {_text(f'functions.{name}:')} /[0-9]{{1,3}}/ {mark(ARGUMENTS)}"
                rules += [f"{rule}: {head} {rule}_arguments {mark(CALL_END)}", _json(f"{rule}_arguments", schema)]
            case _:
                head = _text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
                rules += [f"{rule}: {head} {rule}_arguments {_text('}')}", _json(f"{rule}_arguments", schema)]
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


def _marked(rule: str, name: str, schema: Mapping[str, Any], markup: CallMarkup) -> list[str]:
    parts, rules, padding = [], list[str](), markup.padding
    for i, (key, value, required) in enumerate(_properties(schema)):
        parts.append(f"{rule}_{i}" + ("" if required else "?"))
        begin, end = f"{markup.parameter.write(key)}{padding}", f"{padding}{markup.parameter_end}{padding}"
        rules += _parameter(f"{rule}_{i}", begin, end, value)
    head = _text(markup.function.write(name) + padding)
    return [f"{rule}: {_row(head, *parts, _text(markup.function_end))}", *rules]


def _parameter(rule: str, begin: str, end: str, schema: Any) -> list[str]:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return [f"{rule}: {_text(begin)} ({' | '.join(map(_text, choices))}) {_text(end)}"]
        most = schema.get("maxLength")
        letters = f".{{0,{most}}}" if isinstance(most, int) and 0 <= most <= _LONGEST else ".*"
        return [f"{rule}: {_text(begin)} {rule}_value", f"{rule}_value[suffix={_text(end)}]: /(?s:{letters})/"]
    return [f"{rule}: {_text(begin)} {rule}_value {_text(end)}", _json(f"{rule}_value", schema)]


def _pythonic(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
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
        schema = {"x-guidance": {"whitespace_pattern": " ?"}, **schema}
    return json.dumps(schema)


def _row(*parts: str) -> str:
    """Returns a sequence of `parts`, without empty texts."""
    return " ".join(part for part in parts if part != _text(""))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
