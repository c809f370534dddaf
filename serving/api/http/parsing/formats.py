"""The formats in which models write tool calls and reasoning, as defined by their chat templates.

docs/operations.md shows each format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from checkpoints.tokenizer import Tokenizer
from serving.api.http.parsing.text_cursor import SPACE, Head
from serving.api.http.settings import ToolCallForm

_TAIL = 32
"""Number of tokens at a prompt's end in which to look for its last mark."""
_FIRST = 4
"""Number of first output tokens in which to look for the begin mark; white space may precede it."""
_ID = re.compile(r"(?:functions\.)?(.+?)(:\d{1,9})?", re.DOTALL)
_QUOTED = re.compile(r"""\s*(["'])(.+?)\1""", re.DOTALL)


@dataclass(frozen=True)
class CallSyntax:
    """How models write a call between the marks of a format."""

    heads: tuple[Head, ...]
    """The beginning of a call, in the usual spellings; the first one is used in forced calls."""
    ends: tuple[str, ...] = ()
    """Marks after a call; empty if only the mark after all calls ends it."""
    parameters: tuple[Head, ...] = ()
    """The beginning of a parameter; empty if the arguments are a JSON object."""
    value_ends: tuple[str, ...] = ()
    """Marks after a value, which is text; empty if values are Python literals. Further ones than the first end a value
    only if another mark or the end of the text follows."""
    padding: str = ""
    """Text before and after each value."""
    between: str = SPACE + ","
    """Characters that are ignored between arguments."""
    tagged: bool = False
    """The name is a tag that is also the call's id, because models expect it in later turns."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of a tagged call."""
        head = self.heads[0]
        return (head.before, head.after.strip(), self.ends[0]) if self.tagged else ()

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks before the name of a call."""
        return _distinct(self.heads)

    @property
    def parameter_begins(self) -> tuple[str, ...]:
        """Marks before the name of a parameter."""
        return tuple(mark for mark in _distinct(self.parameters) if mark.startswith("<"))

    def named(self, written: str) -> tuple[str, str | None]:
        """Returns a call's name, and its id if it has one."""
        name = plain_name(written)
        matched = _ID.fullmatch(name) if self.tagged else None
        if matched is None:
            return name, None
        return matched[1], f"functions.{matched[1]}{matched[2]}" if matched[2] else None


def _distinct(heads: tuple[Head, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(head.before for head in heads if head.before))


def plain_name(written: str) -> str:
    """Returns the name of a function or a parameter without white space, quotes, and what follows quotes."""
    quoted = _QUOTED.match(written)
    return quoted[2] if quoted else written.strip().strip("\"'")


_DECORATED = re.compile(r"^(?:functions|tools|default_api)[./]|(?:\(\))?/?$")


def offered_name(name: str, offered: Container[str]) -> str:
    """Returns the name under which a tool is offered: models add a namespace, parentheses, and the end of a tag."""
    plain = _DECORATED.sub("", name)
    return plain if name not in offered and plain in offered else name


_JSON_NAME = r'[^"\\]{1,256}'
JSON = CallSyntax(tuple(
    Head('{ "name" : "', f'" , "{word}" : ', name=_JSON_NAME, ahead=r"(?=\{)") for word in ("arguments", "parameters")
))  # fmt: skip
"""`{"name": ..., "arguments": {...}}`, or a list of such objects. The fields may also have another order."""
TAGGED = CallSyntax(
    (
        Head("<|tool_call_begin|>", " <|tool_call_argument_begin|> ", ahead=r"(?=\S)"),
        Head("<|tool_call_begin|>", " ", name=r"[\w.\-:]{1,256}+", ahead=r"(?=\{)"),
        Head("", " <|tool_call_argument_begin|> ", name=r"[\w.\-:]{1,256}+", ahead=r"(?=\S)"),
    ),
    ("<|tool_call_end|>",), tagged=True,
)  # fmt: skip
_KEYED = (
    Head("<arg_key>", "</arg_key> <arg_value>"), Head("<arg_key>", " <arg_value>"),
    Head("<arg_key>", "</arg_key>", ahead=r"\s{0,16}(?=[^<\s])"),
)  # fmt: skip
FUNCTION = CallSyntax(
    (Head("<function=", ">"), Head("<function name=", ">"), Head("<invoke name=", ">"),
     Head("<function=", " ", name=r"[\w.\-]{1,256}", ahead="(?=<)")), ("</function>", "</invoke>"),
    (Head("<parameter=", ">"), Head("<parameter name=", ">"),
     Head("<parameter=", "\n", name=r"[\w.\-]{1,256}"), *_KEYED), ("</parameter>", "</param>", "</arg_value>"),
    padding="\n",
)  # fmt: skip
"""`<function=name>`, then `<parameter=key>`, a value and `</parameter>` on separate lines, then `</function>`."""
ARGUMENT = CallSyntax(
    (Head("", " ", name=r"[\w.\-]{1,256}", ahead="(?=[<{])"),),
    parameters=(*_KEYED, Head("<parameter=", ">")), value_ends=("</arg_value>", "</arg_key>", "</parameter>"),
)  # fmt: skip
PYTHON = CallSyntax(
    (Head("", " (", name=r"[A-Za-z_][\w.\-]{0,255}"),), (")",),
    (Head("", " =", name=r"[\w.\-]{1,256}"), Head("", " : ", name=r"[A-Za-z_]\w{0,255}", ahead=r"(?=[\"'\[{])"),
     Head('"', '" :', name=r"\w{1,256}"), Head("'", "' :", name=r"\w{1,256}")),
)  # fmt: skip
"""`name(key="text", other=[1, None])`, or `name({"key": "text"})`. Arguments without a name get the names of the tool's
parameters, in order."""
KEYS = (
    Head('{ "', '" :', name=r'[^"\\]{1,256}'), Head("{ '", "' :", name=r"[^'\\]{1,256}"),
    Head("{ ", " :", name=r"[A-Za-z_]\w{0,255}"), Head("{ ", "}", name=""),
)  # fmt: skip
"""The beginning of an object: its first key, or the end of an empty one."""
SYNTAXES = (JSON, FUNCTION, TAGGED, ARGUMENT, PYTHON)
BARE = [mark for syntax in SYNTAXES for mark in syntax.begins if mark.startswith("<")]
"""Marks of calls that models write without a begin mark."""
OF_LINES = [syntax for syntax in SYNTAXES if not syntax.heads[0].before.startswith("<")]
"""Syntaxes whose calls begin at the beginning of a line if they have no begin mark."""


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
WRAPPERS: Mapping[str, str] = MappingProxyType(
    {form.begin: form.end for form in FORMATS.values()}
    | {f"<{name}>": f"</{name}>" for name in ("tools", "function_call", "minimax:tool_call")}
    | {"<|tool_call_section_begin|>": "<|tool_call_section_end|>"}
)
"""Marks before and after calls that models of any format write."""


def form_of(tokenizer: Tokenizer | None) -> ToolCallForm | None:
    """Returns the format in the model's chat template, otherwise a format with a mark that is a token; None if there
    is neither."""
    if tokenizer is None:
        return None
    signs = {name: form.sign or form.begin for name, form in FORMATS.items()}
    in_template = (name for name, sign in signs.items() if tokenizer.chat_template_mentions(sign))
    as_token = (name for name, sign in signs.items() if "|" in sign and tokenizer.token_to_id(sign) is not None)
    return next(in_template, None) or next(as_token, None)


class ReasoningMarks(NamedTuple):
    """Text before and after reasoning."""

    begin: str
    end: str


THINK = ReasoningMarks("<think>", "</think>")


def reasoning_marks(tokenizer: Tokenizer | None) -> ReasoningMarks | None:
    """Returns the marks around reasoning if the chat template contains one of them; otherwise None.

    Some templates only start reasoning (OLMo 3), or only remove it from earlier turns (LFM2.5).
    """
    if tokenizer is None or not any(tokenizer.chat_template_mentions(mark) for mark in THINK):
        return None
    return THINK


def opening_of(tokenizer: Tokenizer, prompt: list[int], marks: ReasoningMarks) -> tuple[bool, bool]:
    """Returns whether a prompt ends within reasoning, and whether it ends with the end mark: reasoning is disabled."""
    text = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    return text.endswith(marks.begin), text.endswith(marks.end)


def reasoning_counter(
    tokenizer: Tokenizer, marks: ReasoningMarks, *, begun: bool, until: str | None = None
) -> Callable[[list[int]], int] | None:
    """Returns a function that counts the tokens of a choice that belong to its reasoning, including the marks; None if
    a mark is not one token. `until`: a text that also ends reasoning, and belongs to the answer."""
    begin, end = (tokenizer.token_to_id(mark) for mark in marks)
    last = None if until is None else tokenizer.token_to_id(until)

    def count(token_ids: list[int]) -> int:
        if not begun and begin not in token_ids[:_FIRST]:
            return 0
        ends = [token_ids.index(token) + (token == end) for token in (end, last) if token in token_ids]
        return min(ends, default=len(token_ids))

    return None if begin is None or end is None else count
