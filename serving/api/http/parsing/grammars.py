"""Grammars of answers, in Lark's syntax: of forced calls, and of structural tags; schemas reduced to what they enforce.

Structural tags are formats of parts of an answer, as XGrammar defines them and vLLM and SGLang accept them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from serving.api.http.parsing.formats import FORMATS, CallSyntax
from serving.api.http.protocol.chat import Tool
from serving.api.http.protocol.common import OF_GRAMMAR
from serving.api.http.settings import ToolCallForm
from serving.core.errors import RequestError

T = TypeVar("T")
_MOST = 256
"""Maximum number of tags and other parts."""
_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)
MOST_CALLS = 16
"""Maximum number of calls in one answer."""
_LONGEST = 1000
"""Largest `maxLength` that a grammar enforces; larger ones would need too many grammar states."""
_WITHIN = ("$defs", "definitions")
"""Definitions that the parts of a schema may refer to."""
_UNENFORCED = frozenset({
    OF_GRAMMAR,
    "propertyNames", "uniqueItems", "if", "then", "else", "not", "dependentRequired", "dependentSchemas",
    "dependencies", "contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Words that the grammar library does not know."""
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer",
    "relative-json-pointer",
})  # fmt: skip
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Words whose value is a table of schemas by name."""
_OF_VALUES = ("enum", "const", "default", "examples", "example")
"""Words whose value is no schema."""
_KINDS: Mapping[type, str] = {str: "a text", list: "a list", dict: "a table"}
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def enforceable(schema: Any, words: set[str] | None = None) -> Any:
    """Returns a schema without the words that a grammar cannot enforce, and adds these words to `words`."""
    if isinstance(schema, list):
        return [enforceable(each, words) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for word, value in schema.items():
        if _known(word, value):
            if word in _OF_NAMES and isinstance(value, Mapping):
                kept[word] = {name: enforceable(each, words) for name, each in value.items()}
            else:
                kept[word] = value if word in _OF_VALUES else enforceable(value, words)
        elif words is not None:
            words.add(word)
    return kept


def _known(word: str, value: Any) -> bool:
    if word == "format" and isinstance(value, str):
        return value in _FORMATS
    if word == "pattern" and isinstance(value, str):
        return not any(mark in value for mark in _LOOK_AROUND)
    return word not in _UNENFORCED


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
        if style.syntax.parameters:
            rules += (_marked if style.syntax.value_ends else _pythonic)(rule, name, schema, style.syntax)
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
    parts, rules, padding, head = [], list[str](), syntax.padding, syntax.parameters[0]
    for i, (key, value, required) in enumerate(_properties(schema)):
        parts.append(f"{rule}_{i}" + ("" if required else "?"))
        begin, end = f"{head.write(key)}{padding}", f"{padding}{syntax.value_ends[0]}{padding}"
        rules += _parameter(f"{rule}_{i}", begin, end, value)
    begin = _text(syntax.heads[0].write(name) + padding)
    return [f"{rule}: {_row(begin, *parts, _text(''.join(syntax.ends[:1])))}", *rules]


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


def structural_grammar(tag: Mapping[str, Any]) -> str:
    """Returns a grammar, in Lark's syntax, of an answer with these tags.

    Args:
        tag: `{"format": {...}}`, or the older `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`.

    Raises:
        RequestError: the format is unknown or incomplete.
    """
    form = tag.get("format") or {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}}
        for each in _need(tag, "structures", list) if isinstance(each, Mapping)
    ]}  # fmt: skip
    rules = _Rules()
    return "\n".join([f"start: {rules.part(form)}", *rules.written, "any_text: /(?s:.*)/"])


class _Rules:
    """The rules of a grammar, as its parts need them."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: _text(_need(form, "value", str)),
            "json_schema": lambda form: self._rule(
                f": %json {json.dumps(enforceable(_need(form, 'json_schema', dict)))}"
            ),
            "regex": lambda form: self._rule(f": /{in_slashes(_need(form, 'pattern', str))}/"),
            "any_text": lambda form: "any_text",
            "sequence": lambda form: " ".join(map(self.part, _need(form, "elements", list))),
            "or": lambda form: f"({' | '.join(map(self.part, _need(form, 'elements', list)))})",
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def part(self, form: Any) -> str:
        """Returns the expression of a format."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise RequestError(f"structural_tag: a format has one of the types {', '.join(self._kinds)}, not {kind!r}")
        return self._kinds[kind](form)

    def _rule(self, body: str) -> str:
        if len(self.written) >= _MOST:
            raise RequestError(f"structural_tag has more than {_MOST} parts")
        name = f"part_{len(self.written)}"
        self.written.append(name + body)
        return name

    def _tag(self, form: Mapping[str, Any], begin: str | None = None) -> str:
        """`begin`: the rest of the tag's beginning, after a trigger."""
        before = _need(form, "begin", str) if begin is None else begin
        content, end = form.get("content"), form.get("end")
        ends: list[Any] = end if isinstance(end, list) and end else [end]
        if not all(isinstance(each, str) for each in ends):
            raise RequestError("structural_tag: the end of a tag must be a text")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and ends[0]:
            inner = " | ".join(self._rule(f"[suffix={_text(each)}]: /(?s:.*)/") for each in ends)
            return f"{_text(before)} ({inner})"
        return f"{_text(before)} {self.part(content)} ({' | '.join(map(_text, ends))})"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers, tags = [t for t in _need(form, "triggers", list) if isinstance(t, str) and t], list[str]()
        for tag in _need(form, "tags", list):
            begin = _need(tag, "begin", str)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise RequestError(f"structural_tag: no trigger begins the tag {begin[:64]!r}")
            text = self._rule(f"[lazy]: /(?s:.*)/ {_text(trigger)}")
            tags.append(self._rule(f": {text} {self._tag(tag, begin.removeprefix(trigger))}"))
        first = form.get("stop_after_first")
        count = ("" if first else "+") if form.get("at_least_one") else "?" if first else "*"
        return f"({' | '.join(tags)}){count}{'' if first and form.get('at_least_one') else ' any_text'}"

    def _separated(self, form: Mapping[str, Any]) -> str:
        one = f"({' | '.join(self._tag(tag) for tag in _need(form, 'tags', list))})"
        more = "" if form.get("stop_after_first") else f" ({_text(_need(form, 'separator', str))} {one})*"
        return f"({one}{more}){'' if form.get('at_least_one') else '?'}"


def _need(form: Any, name: str, kind: type[T]) -> T:
    value = form.get(name) if isinstance(form, Mapping) else None
    if not isinstance(value, kind):
        raise RequestError(f"structural_tag: {name} must be {_KINDS[kind]}")
    return value


def in_slashes(pattern: str) -> str:
    """Returns a regular expression as it stands between slashes in Lark's syntax."""
    return _ESCAPED.sub(lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern)
