"""The formats in which models write tool calls, as defined by their chat templates.

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

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from checkpoints.tokenizer import Tokenizer
from serving.api.http.parsing.json_calls import ARGUMENTS, CALL, CALL_END
from serving.api.http.parsing.marked_calls import ARGUMENT_MARKUP, FUNCTION_MARKUP, CallMarkup
from serving.api.http.settings import ToolCallForm


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
