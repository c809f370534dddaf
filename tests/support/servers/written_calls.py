"""Tool calls as models write them in each format, and what a reader finds in such texts."""

import json

import tokenizers

from checkpoints.tokenizer import Tokenizer, load_tokenizer
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.answer_pieces import whole_calls
from serving.api.http.protocol.chat import Tool


def _json(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def _qwen(name, arguments):
    values = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _ling(name, arguments):
    pairs = ((key, _plain(value)) for key, value in arguments.items())
    values = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs)
    return f"<tool_call>{name}{values}</tool_call>"


def _kimi(index, name, arguments):
    tag = f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
    return f"{tag}{json.dumps(arguments)}<|tool_call_end|>"


FORMS = ("hermes", "nemotron", "qwen3_coder", "jamba", "kimi_k2", "lfm2", "ling3", "olmo3")


def written(form, *calls, literal=json.dumps):
    """Calls, each a name and arguments, in one format. `literal` writes the values of calls in Python's syntax."""

    def python(name, arguments):
        return f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"

    match form:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)
        case "nemotron":
            return f"<TOOLCALL>[{', '.join(_json(*call) for call in calls)}]</TOOLCALL>"
        case "qwen3_coder":
            return "\n".join(_qwen(*call) for call in calls)
        case "jamba":
            return f"<tool_calls>[{', '.join(_json(*call) for call in calls)}]</tool_calls>"
        case "kimi_k2":
            whole = "".join(_kimi(i, *call) for i, call in enumerate(calls))
            return f"<|tool_calls_section_begin|>{whole}<|tool_calls_section_end|>"
        case "lfm2":
            return f"<|tool_call_start|>[{', '.join(python(*call) for call in calls)}]<|tool_call_end|>"
        case "ling3":
            return "\n".join(_ling(*call) for call in calls)
        case "olmo3":
            return "<function_calls>" + "\n".join(python(*call) for call in calls) + "</function_calls>"
    raise AssertionError(form)


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
