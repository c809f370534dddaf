"""One turn of a conversation, for all chat APIs: the job for the engine, and the readers for its text."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.http.context import Context
from serving.api.http.generation import (
    Job,
    ResponseContext,
    UsageCounter,
    check_choices,
    check_form,
    check_logprobs,
    check_size,
)
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.call_formats import FORMATS
from serving.api.http.parsing.forced_calls import calls_grammar, marks_of
from serving.api.http.parsing.reasoning import ReasoningCount, ReasoningReader, ReasoningStart, opening_of
from serving.api.http.parsing.tool_calls import ToolCallReader
from serving.api.http.protocol.chat import AllowedTools, ChatRequest, NamedTool, Tool
from serving.api.http.sampling import sampling_params
from serving.engine.request_error import RequestError
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.grammar_state import StructuredOutputs
from serving.engine.structured.grammars import Grammar
from serving.engine.structured.reasoning import Reasoning


def offered_tools(body: ChatRequest) -> list[Tool]:
    """Returns the functions that are offered to the model."""
    tools: Sequence[Tool] = body.tools or ()
    match body.tool_choice:
        case "none":
            return []
        case AllowedTools() as choice:
            return [tool for tool in tools if tool.function.name in choice.names]
    return [*tools]


def forced_tools(body: ChatRequest) -> list[Tool]:
    """Returns the functions of which the model must call at least one; empty if no call is required."""
    match body.tool_choice:
        case "required":
            return offered_tools(body)
        case AllowedTools() as choice if choice.allowed_tools.mode == "required":
            return offered_tools(body)
        case NamedTool() as choice:
            return [tool for tool in body.tools or () if tool.function.name == choice.function.name]
    return []


def messages_of(body: ChatRequest) -> list[dict[str, Any]]:
    """Returns the conversation for the chat template, with earlier reasoning under the name `reasoning_content`."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    for message in messages:
        if message.get("reasoning") is not None and message.get("reasoning_content") is None:
            message["reasoning_content"] = message["reasoning"]
    return messages


def template_options(body: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template other than the messages; `defaults` apply to those that the request omits."""
    effort: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        effort = {"reasoning_effort": body.reasoning_effort}
        if body.reasoning_effort == "none":
            effort["enable_thinking"] = False
    return {
        **defaults,
        **effort,
        **(body.chat_template_kwargs or {}),
        "tools": [tool.model_dump(exclude_unset=True) for tool in offered_tools(body)] or None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
    }


class ChatTurn:
    """One turn of a conversation.

    Args:
        responses: the server's codec, model name, defaults and formats.
        body: the request, in the format of `/v1/chat/completions`.
        prompt: token ids of the conversation.
        prefix: prefix of the response's id.

    Raises:
        RequestError: the request combines incompatible options.
    """

    def __init__(
        self, responses: ResponseContext, body: ChatRequest, prompt: list[int], *, prefix: str = "chatcmpl-"
    ) -> None:
        self._tools = offered_tools(body)
        forced = forced_tools(body)
        self._forced = bool(forced)
        self._form = responses.tool_calls if self._tools else None
        self._most_calls = None if body.parallel_tool_calls else 1
        params = sampling_params(body, responses.defaults)
        if forced:
            self._form = responses.tool_calls or "hermes"
            if params.structured_outputs is not None:
                raise RequestError("structured outputs cannot be combined with a tool_choice that forces a call")
            named = isinstance(body.tool_choice, NamedTool)
            grammar = calls_grammar(
                self._form,
                forced,
                parallel=body.parallel_tool_calls and not named,
                token_ids=responses.codec.special_ids(marks_of(self._form)),
            )
            params = dataclasses.replace(params, structured_outputs=StructuredOutputs(grammar=grammar))
        if self._form is not None:
            params = responses.codec.showing(params, *marks_of(self._form))
        tokenizer, self._marks, self._opening = (
            responses.codec.tokenizer,
            responses.reasoning,
            ReasoningStart(False, False),
        )
        count: ReasoningCount | None = None
        if self._marks is not None and tokenizer is not None:
            self._opening = opening_of(tokenizer, prompt, self._marks)
            if not self._opening.ended:
                params = self._with_reasoning(responses, params, body.thinking_token_budget)
                count = ReasoningCount.of(tokenizer, self._marks, begun=self._opening.begun, until=self._until)
        self.job = Job(f"{prefix}{uuid.uuid4().hex}", [prompt], params, body.priority, body.cache_salt)
        self.grammar: Grammar | None = None
        """Keeps the compiled grammar alive until the engine requests it."""
        self.tally = UsageCounter(self.job, reasoning=count)

    @classmethod
    async def of(cls, context: Context, body: ChatRequest, *, prefix: str = "chatcmpl-") -> ChatTurn:
        """Renders and tokenises the conversation, and checks the request.

        Raises:
            ApiError, RequestError: the request is invalid.
        """
        check_choices(context, body, 1)
        check_logprobs(context, body.top_logprobs, "top_logprobs")
        options = template_options(body, context.settings.default_chat_template_kwargs)
        special = body.add_special_tokens is True
        prompt = await context.codec.encode_chat(messages_of(body), add_special_tokens=special, **options)
        check_size(context, [prompt], "messages")
        turn = cls(ResponseContext.of(context, body.model), body, prompt, prefix=prefix)
        turn.grammar = await check_form(context, turn.job.params)
        return turn

    def new_reader(self) -> AnswerReader:
        """Returns a reader for the text of one choice."""
        reasoning = None
        if self._marks is not None and not self._opening.ended:
            reasoning = ReasoningReader(self._marks, begun=self._opening.begun, until=self._until)
        calls = None
        if self._form is not None:
            calls = ToolCallReader(self._form, self._tools, most=self._most_calls, forced=self._forced)
        return AnswerReader(reasoning, calls)

    @property
    def _until(self) -> str | None:
        """The mark of calls, if it also ends reasoning."""
        style = None if self._form is None else FORMATS[self._form]
        return style.begin if style is not None and style.ends_reasoning else None

    def _with_reasoning(self, responses: ResponseContext, params: SamplingParams, budget: int | None) -> SamplingParams:
        assert self._marks is not None
        params = responses.codec.showing(params, self._marks.end)
        if params.structured_outputs is None and budget is None:
            return params  # without a grammar or a budget, the engine does not need to distinguish reasoning
        begin, end = self._marks
        reasoning = Reasoning(begin, end, begun=self._opening.begun, budget=budget)
        return dataclasses.replace(params, reasoning=reasoning)
