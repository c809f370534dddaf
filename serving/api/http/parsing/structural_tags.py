"""Structural tags: formats of parts of an answer, as XGrammar defines them and vLLM and SGLang accept them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from serving.api.http.parsing.json_schemas import enforceable
from serving.core.errors import RequestError

T = TypeVar("T")
_MOST = 256
"""Maximum number of tags and other parts."""
_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


def structural_grammar(tag: Mapping[str, Any]) -> str:
    """Returns a grammar, in Lark's syntax, of an answer with these tags.

    Args:
        tag: `{"format": {...}}`, or the older `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`.

    Raises:
        RequestError: the format is unknown or incomplete.
    """
    form = tag.get("format") or {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema")}}
        for each in _items(tag, "structures") if isinstance(each, Mapping)
    ]}  # fmt: skip
    rules = _Rules()
    return "\n".join([f"start: {rules.part(form)}", *rules.written, "any_text: /(?s:.*)/"])


class _Rules:
    """The rules of a grammar, as its parts need them."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: _text(form, "value"),
            "json_schema": lambda form: self._rule(
                f": %json {json.dumps(enforceable(_need(form, 'json_schema', dict, 'a table')))}"
            ),
            "regex": lambda form: self._rule(f": /{in_slashes(_string(form, 'pattern'))}/"),
            "any_text": lambda form: "any_text",
            "sequence": lambda form: " ".join(map(self.part, _items(form, "elements"))),
            "or": lambda form: f"({' | '.join(map(self.part, _items(form, 'elements')))})",
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
        before, content, end = _string(form, "begin") if begin is None else begin, form.get("content"), form.get("end")
        ends = end if isinstance(end, list) and end else [end]
        if not all(isinstance(each, str) for each in ends):
            raise RequestError("structural_tag: the end of a tag must be a text")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and ends[0]:
            inner = " | ".join(self._rule(f"[suffix={json.dumps(each)}]: /(?s:.*)/") for each in ends)
            return f"{json.dumps(before)} ({inner})"
        return f"{json.dumps(before)} {self.part(content)} ({' | '.join(map(json.dumps, ends))})"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers, tags = [t for t in _items(form, "triggers") if isinstance(t, str) and t], list[str]()
        for tag in _items(form, "tags"):
            begin = _string(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise RequestError(f"structural_tag: no trigger begins the tag {begin[:64]!r}")
            text = self._rule(f"[lazy]: /(?s:.*)/ {json.dumps(trigger)}")
            tags.append(self._rule(f": {text} {self._tag(tag, begin.removeprefix(trigger))}"))
        first = form.get("stop_after_first")
        count = ("" if first else "+") if form.get("at_least_one") else "?" if first else "*"
        return f"({' | '.join(tags)}){count}{'' if first and form.get('at_least_one') else ' any_text'}"

    def _separated(self, form: Mapping[str, Any]) -> str:
        one = f"({' | '.join(self._tag(tag) for tag in _items(form, 'tags'))})"
        more = "" if form.get("stop_after_first") else f" ({_text(form, 'separator')} {one})*"
        return f"({one}{more}){'' if form.get('at_least_one') else '?'}"


def _need(form: Any, name: str, kind: type[T], what: str) -> T:
    value = form.get(name) if isinstance(form, Mapping) else None
    if not isinstance(value, kind):
        raise RequestError(f"structural_tag: {name} must be {what}")
    return value


def _string(form: Any, name: str) -> str:
    return _need(form, name, str, "a text")


def _items(form: Any, name: str) -> list[Any]:
    return _need(form, name, list, "a list")


def _text(form: Any, name: str) -> str:
    return json.dumps(_string(form, name), ensure_ascii=False)


def in_slashes(pattern: str) -> str:
    """Returns a regular expression as it stands between slashes in Lark's syntax."""
    return _ESCAPED.sub(lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern)
