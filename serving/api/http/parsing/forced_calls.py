"""Grammars of tool calls, for requests with a `tool_choice` that forces a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.http.parsing.call_formats import FORMATS
from serving.api.http.parsing.json_calls import ARGUMENTS, CALL, CALL_END
from serving.api.http.parsing.marked_calls import CallMarkup
from serving.api.http.protocol.chat import Tool
from serving.api.http.settings import ToolCallForm

MOST_CALLS = 16
"""Maximum number of calls in one answer."""
_LONGEST = 1000
"""Largest `maxLength` that a grammar enforces; larger ones would need too many grammar states."""
_WITHIN = ("$defs", "definitions")
"""Definitions that the parts of a schema may refer to."""


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
