"""Grammars of tool calls, for requests that want one whatever the model would rather do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.http.protocol.chat import Tool
from serving.api.http.tool_calls import MARKS, ToolCallForm

MOST_CALLS = 16
"""Calls of one answer."""
_LONGEST = 1000
"""Characters of texts whose lengths are held to; longer bounds cost more states than they are worth."""
_WITHIN = ("$defs", "definitions")
"""What a schema's parts may refer to."""


def calls_grammar(form: ToolCallForm, tools: Sequence[Tool], *, parallel: bool) -> str:
    """A grammar, in Lark's syntax, of an answer that calls one of the tools, or (`parallel`) several.

    Arguments follow the tools' schemas.
    """
    begin, end = MARKS[form]
    functions = " | ".join(f"function_{i}" for i in range(len(tools)))
    rules = [f"function: {functions}"]

    def one_or_more(rule: str, between: str) -> str:
        return f"{rule} ({_text(between)} {rule}){{0,{MOST_CALLS - 1}}}" if parallel else rule

    if form == "nemotron":
        rules.append(f"start: {_text(begin + '[')} {one_or_more('function', ', ')} {_text(']' + end)}")
    else:
        newline = "\n"
        rules.append(f"start: {one_or_more('call', newline)}")
        rules.append(f"call: {_text(begin + newline)} function {_text(newline + end)}")
    write = _marked if form == "qwen3_coder" else _as_json
    for i, tool in enumerate(tools):
        rules += write(f"function_{i}", tool.function.name, tool.function.parameters or {"type": "object"})
    return "\n".join(rules)


def _as_json(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return [f"{rule}: {_text(head)} {rule}_arguments {_text('}')}", f"{rule}_arguments: %json {_schema(schema)}"]


def _marked(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else ()
    within = {key: schema[key] for key in _WITHIN if key in schema}
    parts, rules = [], []
    for i, (key, value) in enumerate(properties.items()):
        parts.append(f"{rule}_{i}" + ("" if key in required else "?"))
        rules += _parameter(f"{rule}_{i}", key, value, within)
    body = " ".join([_text(f"<function={name}>\n"), *parts, _text("</function>")])
    return [f"{rule}: {body}", *rules]


def _parameter(rule: str, key: str, schema: Any, within: Mapping[str, Any]) -> list[str]:
    begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return [f"{rule}: {_text(begin)} ({' | '.join(map(_text, choices))}) {_text(end)}"]
        most = schema.get("maxLength")
        letters = f".{{0,{most}}}" if isinstance(most, int) and 0 <= most <= _LONGEST else ".*"
        return [f"{rule}: {_text(begin)} {rule}_value", f"{rule}_value[suffix={_text(end)}]: /(?s:{letters})/"]
    value = {**within, **schema} if isinstance(schema, Mapping) else schema
    return [f"{rule}: {_text(begin)} {rule}_value {_text(end)}", f"{rule}_value: %json {_schema(value)}"]


def _schema(schema: Any) -> str:
    """With little space between its parts: models may write nothing else."""
    if isinstance(schema, Mapping):
        schema = {"x-guidance": {"whitespace_pattern": " ?"}, **schema}
    return json.dumps(schema)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
