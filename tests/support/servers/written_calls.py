"""Tool calls as models write them in each format, and what a reader finds in such texts."""

import json

import tokenizers

from checkpoints.tokenizer import Tokenizer, load_tokenizer
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.answer_pieces import whole_calls
from serving.api.http.protocol.chat import Tool


def _json(_, name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _python(_, name, arguments):
    return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"


def _plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def _qwen(_, name, arguments):
    values = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _ling(_, name, arguments):
    pairs = ((key, _plain(value)) for key, value in arguments.items())
    values = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>{name}{values}</tool_call>"


def _kimi(index, name, arguments):
    tag = f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
    return f"{tag}{json.dumps(arguments)}<|tool_call_end|>"


FORMS = {
    "hermes": ("<tool_call>\n", _json, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "nemotron": ("<TOOLCALL>[", _json, ", ", "]</TOOLCALL>"),
    "qwen3_coder": ("", _qwen, "\n", ""),
    "jamba": ("<tool_calls>[", _json, ", ", "]</tool_calls>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", _kimi, "", "<|tool_calls_section_end|>"),
    "lfm2": ("<|tool_call_start|>[", _python, ", ", "]<|tool_call_end|>"),
    "ling3": ("", _ling, "\n", ""),
    "olmo3": ("<function_calls>", _python, "\n", "</function_calls>"),
}
"""What a format writes before all calls, for each, between two, and after all."""


def written(form, *calls):
    """Calls, each a name and arguments, in one format."""
    begin, write, between, end = FORMS[form]
    return begin + between.join(write(i, *call) for i, call in enumerate(calls)) + end


def found(form, pieces, tools=(), *, cut=False, **options):
    """What a reader finds in a text that arrives in these pieces: the text that it shows, and the calls."""
    reader, shown, calls = AnswerReader(form, [Tool.model_validate(tool) for tool in tools], **options), "", []
    for piece in (*pieces, None):
        new = reader.push(piece or "", last=piece is None, cut=cut)
        shown, calls = shown + new.of("text"), calls + new.calls
    return shown, [(call.function.name, call.function.arguments) for call in whole_calls(calls)]


def cut(text, size):
    """The text in pieces of this size."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def tool_with(properties, **more):
    """The tool `f` with these parameters; `more`: other words of its schema."""
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties, **more}}}


def tokenizer_with(*marks, template="", special=True):
    """The demo model's tokenizer with more tokens, and a chat template."""
    fields = json.loads(load_tokenizer("demo").to_json())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": special}
    size = len(fields["model"]["vocab"])
    fields["added_tokens"] += [{"id": size + i, "content": mark, **flags} for i, mark in enumerate(marks)]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(fields)), chat_templates={"default": template})
