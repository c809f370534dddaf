"""What the engine gets for a request: prompts as token ids, sampling parameters, and the job of one turn."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from checkpoints.text.chat import plain_message
from checkpoints.text.parts import part_text
from serving.api.http.apis.cache_marks import client_marks, marks_of, places_of, with_marks
from serving.api.http.context import ResponseContext
from serving.api.http.errors import ApiError
from serving.api.http.generation import Job
from serving.api.http.json_values import parse_written
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.formats import FORMATS, opening_of, reasoning_counter
from serving.api.http.parsing.grammars import calls_grammar, enforceable, structural_grammar
from serving.api.http.protocol.chat import AllowedTools, ChatRequest, NamedTool, Tool, ToolChoices
from serving.api.http.protocol.common import CUSTOM_INPUT, OF_GRAMMAR, GenerationRequest
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.text import check_fits
from serving.core.cache.retention import Mark
from serving.core.errors import RequestError
from serving.engine.requests.conversations import message_digests
from serving.engine.requests.request import EngineRequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.grammars import StructuredOutputs
from serving.engine.structured.reasoning import Reasoning

COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API."""

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "skip_special_tokens", "return_sampling_mask",
)  # fmt: skip


_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
"""Names of earlier reasoning in a message, in the forms of several APIs."""
_THOUGHTS_OF_PART = ("thinking", "reasoning", "text", "summary", "content")
_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")


async def tokenized(
    context: ResponseContext, request: ChatRequest | CompletionRequest, *, fits: bool = True
) -> tuple[list[list[int]], tuple[Mark, ...]]:
    """Returns the token ids of each prompt of a request, and the marks of a conversation. `fits`: it is a request to
    generate, whose prompts get marks and are refused if they are too long.

    Raises:
        ApiError, RequestError: the request has too many choices or alternatives; a prompt is empty or too long, or
            contains a token id beyond the vocabulary.
    """
    codec, asked_to_fit = context.codec, fits
    fits = fits and request.truncate_prompt_tokens is None
    marks: tuple[Mark, ...] = ()
    if isinstance(request, ChatRequest):
        _check_counts(context, request.n, request.top_logprobs, "top_logprobs")
        options = template_options(request, context.settings.default_chat_template_kwargs)
        special = request.add_special_tokens is True
        options |= {"add_special_tokens": special, "previous_token_ids": request.previous_token_ids or ()}
        messages = messages_of(request, context.omitted)
        found = client_marks(request, messages)
        places = partial(places_of, found) if context.marks and asked_to_fit else None
        ids, marks = await codec.encode_chat(messages, places=places, fits=fits, **options)
        prompts = [ids]
    else:
        for name in ("logprobs", "prompt_logprobs"):
            _check_counts(context, len(request.prompts) * request.n, getattr(request, name), name)
        prompts = [prompt for prompt in request.prompts if not isinstance(prompt, str)]
        if not prompts:
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            prompts = await codec.encode(texts, add_special_tokens=request.add_special_tokens is not False)
    if (most := request.truncate_prompt_tokens) is not None:
        most = context.codec.max_model_len - 1 if most == -1 else most
        prompts, marks = [prompt[max(len(prompt) - most, 0) :] for prompt in prompts], ()
    size, param = context.vocab_size, "messages" if isinstance(request, ChatRequest) else "prompt"
    for ids in prompts if asked_to_fit else ():
        if not ids:
            raise ApiError(400, "the prompt is empty", param=param)
        check_fits(len(ids), codec.max_model_len, param)
        if size is not None and max(ids) >= size:
            bad = next(i for i in ids if i >= size)
            raise ApiError(400, f"token id {bad} is not in the vocabulary (0 to {size - 1})", param=param)
    return prompts, marks


def _check_counts(context: ResponseContext, choices: int, alternatives: int | None, param: str) -> None:
    most = context.settings.max_choices
    if choices > most:
        raise ApiError(400, f"{choices} choices (prompts times n): at most {most} are allowed", param="n")
    most = context.max_logprobs
    if alternatives is not None and alternatives > most:
        raise ApiError(400, f"{param} is {alternatives}: at most {most} are allowed", param=param)


def offered_tools(request: ChatRequest) -> list[Tool]:
    """Returns the functions that are offered to the model."""
    tools: Sequence[Tool] = request.tools or ()
    match request.tool_choice:
        case "none":
            return []
        case AllowedTools() as choice:
            return [tool for tool in tools if tool.function.name in choice.names]
    return [*tools]


def forced_tools(request: ChatRequest) -> list[Tool]:
    """Returns the functions of which the model must call at least one; empty if no call is required."""
    match request.tool_choice:
        case "required" | AllowedTools(allowed_tools=ToolChoices(mode="required")):
            return offered_tools(request)
        case NamedTool() as choice:
            return [tool for tool in request.tools or () if tool.function.name == choice.function.name]
    return []


def chat_content(content: Any) -> str | list[Any]:
    """Returns content of any API as content of a chat message. The chat template joins several parts."""
    if not isinstance(content, list):
        return content or "" if isinstance(content, str | None) else part_text(content)
    parts = [{"type": "text", "text": part_text(part), **marks_of(part)} for part in content]
    return parts if len(parts) > 1 or any(map(marks_of, parts)) else "".join(part["text"] for part in parts)


def messages_of(request: ChatRequest, omitted: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Returns the conversation for the chat template: earlier reasoning has the name `reasoning_content`, and calls of
    OpenAI's older form and of tools of type `custom` are calls of functions. `omitted`: the beginnings of lines that
    system text must not have; parts and messages that consist of these are left out."""
    messages = [message.model_dump(exclude_unset=True) for message in request.messages]
    for message in messages:
        if message["role"] == "function":
            message["role"] = "tool"
        if (old := message.pop("function_call", None)) and not message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "function": old}]
        for call in message.get("tool_calls") or ():
            if isinstance(custom := call.get("custom"), dict) and "function" not in call:
                call["function"] = {"name": custom.get("name"), "arguments": {CUSTOM_INPUT: custom.get("input") or ""}}
        if message["role"] == "assistant" and isinstance(content := message.get("content"), list):
            inside, kept = list[Any](), list[Any]()
            for part in content:
                thought = part.get("type") in _THOUGHT_PARTS
                (inside if thought else kept).append(part)
                if thought and kept:  # the part before it takes its mark
                    kept[-1] = kept[-1] | marks_of(part)
            message["content"] = kept
            message |= {"thinking_blocks": message.get("thinking_blocks") or inside} if inside else {}
        if message["role"] == "assistant" and (thoughts := _first_thoughts(message, _THOUGHTS)):
            message["reasoning_content"] = thoughts
        if marks := marks_of(message):
            message["content"] = with_marks(message.get("content"), {name: message.pop(name) for name in marks})
    return [whole for message in messages if (whole := _without_lines(message, omitted))]


def _thoughts(value: Any) -> str:
    """Returns the text of earlier reasoning: a text, or a list of parts."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    texts = (_first_thoughts(part, _THOUGHTS_OF_PART) for part in value if isinstance(part, Mapping))
    return "\n".join(filter(None, texts))


def _first_thoughts(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next(filter(None, (_thoughts(fields.get(name)) for name in names)), "")


def _without_lines(message: dict[str, Any], omitted: tuple[str, ...]) -> dict[str, Any] | None:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part_text(part) for part in parts] if message["role"] in ("system", "developer") and content else []
    if not any(begin in text for text in texts for begin in omitted):
        return message
    kept = ["\n".join(line for line in text.split("\n") if not line.startswith(omitted)) for text in texts]
    parts = [
        part if new == text else {"type": "text", **(part if isinstance(part, Mapping) else {}), "text": new}
        for part, text, new in zip(parts, texts, kept, strict=True)
        if new or not text
    ]
    return {**message, "content": parts if isinstance(content, list) else kept[0]} if parts else None


def template_options(request: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template other than the messages; `defaults` apply to those that the request omits."""
    level = request.reasoning_effort or (request.reasoning and request.reasoning.effort)
    effort: dict[str, Any] = {"reasoning_effort": level} if level else {}
    if request.thinks is not None:
        effort["enable_thinking"] = request.thinks
    return {
        **defaults,
        **effort,
        **(request.chat_template_kwargs or {}),
        "tools": [tool.model_dump(exclude_unset=True, exclude={"cache_control"}) for tool in offered_tools(request)]
        or None,
        "documents": request.documents,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Returns the engine's parameters for a request. `defaults` apply to omitted fields.

    Raises:
        RequestError: the engine refuses a value.
    """
    values = dict(defaults)
    values.update(
        (name, getattr(request, name))
        for name in _SAME_NAME
        if name in request.model_fields_set and getattr(request, name) is not None
    )
    if values.get("top_p") == 0:  # OpenAI's smallest value: the likeliest token
        values["top_p"] = 1e-6
    values["structured_outputs"] = structured_outputs(request)
    match request:
        case CompletionRequest():
            limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
            values["max_tokens"] = max(limit, 1)
            values["logprobs"] = request.logprobs
            values["prompt_logprob_token_ids"] = request.prompt_logprob_token_ids
            asked = request.prompt_logprobs, request.logprobs if request.echo else None
            values["prompt_logprobs"] = max((count for count in asked if count is not None), default=None)
        case ChatRequest():
            limits = (request.max_completion_tokens, request.max_tokens)
            values["max_tokens"] = next((limit for limit in limits if limit is not None), None)
            values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**values)


def unenforced(request: GenerationRequest, tools: Sequence[Tool] = ()) -> list[str]:
    """Returns the words of schemas that no grammar enforces. `tools`: those of which one must be called."""
    form, own, words = request.response_format, request.structured_outputs, set[str]()
    schemas: list[Any] = [own and own.json_]
    if form is not None:
        schemas += [form.schema_, form.json_schema and form.json_schema.schema_, form.format, form.structures]
    for schema in (*schemas, *(tool.function.parameters for tool in tools)):
        enforceable(schema, words)
    return [f"schema.{word}" for word in sorted(words)]


def structured_outputs(request: GenerationRequest) -> StructuredOutputs | None:
    """Returns the output format that a request specifies in vLLM's or OpenAI's field. Refuses both together."""
    form, own = request.response_format, request.structured_outputs
    if form is not None and form.type != "text":
        if own is not None:
            raise RequestError("structured_outputs cannot be combined with response_format")
        if form.type == "structural_tag":
            return StructuredOutputs(grammar=structural_grammar(form.model_dump()))
        schema = form.json_schema.schema_ if form.json_schema and form.type == "json_schema" else form.schema_
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=enforceable(schema))
    if own is None:
        return None
    if own.structural_tag is not None:
        return StructuredOutputs(grammar=structural_grammar(_json_object(own.structural_tag)))
    values = own.model_dump(by_alias=True, exclude={"structural_tag"})
    return StructuredOutputs(**{**values, "json": enforceable(own.json_)})


def _json_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := parse_written(text), dict):
            return value
    raise RequestError("structural_tag must be a JSON object")


class ChatTurn:
    """One turn of a conversation, from a request in the format of `/v1/chat/completions` and its token ids.

    Raises:
        RequestError: the request combines incompatible options.
    """

    def __init__(
        self, context: ResponseContext, request: ChatRequest, prompt: list[int], *, prefix: str = "chatcmpl-"
    ) -> None:
        tools, forced = offered_tools(request), forced_tools(request)
        form = context.tool_calls if tools else None
        params, codec, answer = sampling_params(request, context.settings.default_sampling), context.codec, None
        outputs = params.structured_outputs
        if form is not None and request.response_format is not None and outputs and outputs.grammar is None:
            answer = outputs.json or {"type": "object"}  # JSON or a call
        if forced:
            form = context.tool_calls or "hermes"
            if request.structured_outputs is not None:
                raise RequestError("structured outputs cannot be combined with a tool_choice that forces a call")
        style = None if form is None else FORMATS[form]
        if form is not None and style is not None:
            if forced or answer is not None:
                grammar = calls_grammar(
                    form, forced or tools, token_ids=codec.special_ids(style.marks), answer=None if forced else answer,
                    parallel=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
                )  # fmt: skip
                params = replace(params, structured_outputs=StructuredOutputs(grammar=grammar))
            params = codec.showing(params, *style.marks)
        marks, begun, count = context.reasoning, False, None
        if marks is not None and codec.tokenizer is not None:
            begun, ended = opening_of(codec.tokenizer, prompt, marks)
            if not ended:
                params = codec.showing(params, marks.end)
                if params.stop:
                    params = replace(params, stop_after=("" if begun else marks.begin, marks.end))
                # Without a grammar or a budget, the engine does not need to distinguish reasoning.
                if params.structured_outputs is not None or request.thinking_budget is not None:
                    reasoning = Reasoning(*marks, begun=begun, budget=request.thinking_budget)
                    params = replace(params, reasoning=reasoning)
                until = style.begin if style is not None and style.ends_reasoning else None
                count = reasoning_counter(codec.tokenizer, marks, begun=begun, until=until)
            marks = None if ended else marks
        digests = message_digests([*map(plain_message, messages_of(request, context.omitted))], request.tools)
        asked = EngineRequest(
            f"{prefix}{uuid.uuid4().hex}", "", params, request.priority, request.cache_salt, message_digests=digests
        )
        as_text = style is not None and style.syntax.value_ends  # values in which grammars apply
        ignored = [w for w in unenforced(request, forced) if not (as_text and w.endswith(OF_GRAMMAR))]
        self.job = Job(asked, [prompt], ignored=ignored, reasoning=count)
        most = None if request.parallel_tool_calls else 1
        self.new_reader = partial(AnswerReader, form, tools, most=most, forced=bool(forced), marks=marks, begun=begun)
        """Returns a reader for the text of one choice."""
