"""Calls of functions that a model writes into its answer, in the form that its chat template has taught it.

| form | a call looks like | for example |
|---|---|---|
| `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Granite 4 |
| `nemotron` | `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>` | Nemotron Nano v2 |
| `qwen3_coder` | `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` | Nemotron 3 |
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checkpoints.tokenizer import Tokenizer
from serving.api.http.protocol.chat import CalledFunction, Tool, ToolCall

ToolCallForm = Literal["hermes", "nemotron", "qwen3_coder"]
Calls = Iterator[tuple[str, Any]]

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def opening_mark(form: ToolCallForm) -> str:
    """What stands before a call."""
    return _FORMS[form].begin


def form_of(tokenizer: Tokenizer | None) -> ToolCallForm | None:
    """The form that the model's chat template speaks of; None where it speaks of none."""
    if tokenizer is None:
        return None
    signs: dict[str, ToolCallForm] = {"<TOOLCALL>": "nemotron", "<function=": "qwen3_coder", "<tool_call>": "hermes"}
    return next((form for sign, form in signs.items() if tokenizer.chat_template_mentions(sign)), None)


@dataclass(frozen=True)
class _Form:
    """What stands before and after the calls, and how they are read. `read` raises ValueError for what is none."""

    begin: str
    end: str
    read: Callable[[str, Mapping[str, Any]], Calls]


class ToolCallReader:
    """Takes one choice's text as it comes; tells what of it is for people, and which calls are complete.

    A call comes out whole, when its end has come: half of its arguments are of no use to anybody. What only looks like
    a call stays text.

    Args:
        form: how calls are written.
        tools: those of the request; they say which parameters are texts.
    """

    def __init__(self, form: ToolCallForm, tools: Sequence[Tool]) -> None:
        self._form = _FORMS[form]
        self._parameters = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._text = ""
        self._space = ""
        self.count = 0
        """Calls so far."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """New text; `last` says that no more comes. Returns what to show, and the calls that have become complete."""
        begin, end = self._form.begin, self._form.end
        left, shown, calls = self._text + text, "", []
        while (at := left.find(begin)) >= 0:
            inside = at + len(begin)
            until = left.find(end, inside)
            if until < 0 and not last:
                shown, left = shown + left[:at], left[at:]
                break
            # Models leave out the end of their last call, as nothing follows it.
            until, after = (len(left), len(left)) if until < 0 else (until, until + len(end))
            made = self._read(left[inside:until])
            calls += made
            shown += left[: at if made else after]
            left = left[after:]
        else:
            might = 0 if last else _beginning(left, begin)
            shown, left = shown + left[: len(left) - might], left[len(left) - might :]
        self._text = left
        self.count += len(calls)
        return self._without_space_around_calls(shown, last), calls

    def _without_space_around_calls(self, text: str, last: bool) -> str:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        return whole if last and not self.count else shown

    def _read(self, text: str) -> list[ToolCall]:
        try:
            found = list(self._form.read(text, self._parameters))
        except ValueError:
            return []
        return [
            ToolCall(
                id=f"call_{uuid.uuid4().hex}",
                type="function",
                function=CalledFunction(name=name, arguments=json.dumps(arguments, ensure_ascii=False)),
            )
            for name, arguments in found
        ]


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _json_calls(text: str, parameters: Mapping[str, Any]) -> Calls:
    """One call or a list of them as JSON."""
    found = json.loads(text)
    for call in found if isinstance(found, list) else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("not a call")
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            raise ValueError("arguments have names")
        yield call["name"], arguments


def _marked_calls(text: str, parameters: Mapping[str, Any]) -> Calls:
    """Calls whose parameters stand between marks, as they are: the tool's schema says which of them are texts."""
    found = _FUNCTION.findall(text)
    if not found:
        raise ValueError("not a call")
    for name, body in found:
        known = parameters.get(name.strip(), {}).get("properties") or {}
        values = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(body)}
        yield name.strip(), {key: _value(value, known.get(key)) for key, value in values.items()}


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


_FORMS: dict[str, _Form] = {
    "hermes": _Form("<tool_call>", "</tool_call>", _json_calls),
    "nemotron": _Form("<TOOLCALL>", "</TOOLCALL>", _json_calls),
    "qwen3_coder": _Form("<tool_call>", "</tool_call>", _marked_calls),
}
