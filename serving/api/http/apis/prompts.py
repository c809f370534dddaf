"""Tokenises the prompts of a request, and checks them before any of them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.http.context import ResponseContext
from serving.api.http.errors import ApiError
from serving.api.http.protocol.chat import AllowedTools, ChatRequest, Tool
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.text import check_fits


async def tokenized(
    context: ResponseContext, request: ChatRequest | CompletionRequest, *, fits: bool = True
) -> list[list[int]]:
    """Returns the token ids of each prompt of a request. `fits`: refuse prompts that are too long.

    Raises:
        ApiError, RequestError: the request has too many choices or alternatives; a prompt is empty or too long, or
            contains a token id beyond the vocabulary.
    """
    codec = context.codec
    if isinstance(request, ChatRequest):
        _check_counts(context, request.n, request.top_logprobs, "top_logprobs")
        options = template_options(request, context.settings.default_chat_template_kwargs)
        special = request.add_special_tokens is True
        prompts = [await codec.encode_chat(messages_of(request), add_special_tokens=special, fits=fits, **options)]
    else:
        _check_counts(context, len(request.prompts) * request.n, request.logprobs, "logprobs")
        prompts = [prompt for prompt in request.prompts if not isinstance(prompt, str)]
        if not prompts:
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            prompts = await codec.encode(texts, add_special_tokens=request.add_special_tokens is not False)
    if fits:
        _check_prompts(context, prompts, "messages" if isinstance(request, ChatRequest) else "prompt")
    return prompts


def _check_counts(context: ResponseContext, choices: int, alternatives: int | None, param: str) -> None:
    most = context.settings.max_choices
    if choices > most:
        raise ApiError(400, f"{choices} choices (prompts times n): at most {most} are allowed", param="n")
    most = context.settings.max_logprobs
    if alternatives is not None and alternatives > most:
        raise ApiError(400, f"{param} is {alternatives}: at most {most} are allowed", param=param)


def _check_prompts(context: ResponseContext, prompts: Sequence[Sequence[int]], param: str) -> None:
    size = context.vocab_size
    for ids in prompts:
        if not ids:
            raise ApiError(400, "the prompt is empty", param=param)
        check_fits(len(ids), context.codec.max_model_len, param)
        if size is not None and max(ids) >= size:
            bad = next(i for i in ids if i >= size)
            raise ApiError(400, f"token id {bad} is not in the vocabulary (0 to {size - 1})", param=param)


def offered_tools(request: ChatRequest) -> list[Tool]:
    """Returns the functions that are offered to the model."""
    tools: Sequence[Tool] = request.tools or ()
    match request.tool_choice:
        case "none":
            return []
        case AllowedTools() as choice:
            return [tool for tool in tools if tool.function.name in choice.names]
    return [*tools]


def messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Returns the conversation for the chat template, with earlier reasoning under the name `reasoning_content`."""
    messages = [message.model_dump(exclude_unset=True) for message in request.messages]
    for message in messages:
        if message.get("reasoning") is not None and message.get("reasoning_content") is None:
            message["reasoning_content"] = message["reasoning"]
    return messages


def template_options(request: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template other than the messages; `defaults` apply to those that the request omits."""
    effort: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        effort = {"reasoning_effort": request.reasoning_effort}
        if request.reasoning_effort == "none":
            effort["enable_thinking"] = False
    return {
        **defaults,
        **effort,
        **(request.chat_template_kwargs or {}),
        "tools": [tool.model_dump(exclude_unset=True) for tool in offered_tools(request)] or None,
        "documents": request.documents,
        "add_generation_prompt": request.add_generation_prompt,
    }
