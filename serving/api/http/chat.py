"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.context import Context
from serving.api.http.endpoint import respond
from serving.api.http.generation import (
    ChoiceDelta,
    Job,
    ResponseContext,
    Tally,
    check_choices,
    check_form,
    check_logprobs,
    check_size,
    stream,
)
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.protocol.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
    Delta,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from serving.api.http.protocol.common import ErrorResponse, StreamOptions
from serving.api.http.sampling import sampling_params
from serving.api.http.streaming import DONE, event
from serving.api.http.tool_calls import ToolCallReader, opening_mark
from serving.engine.grammars import Grammar
from serving.engine.output import RequestOutput

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses={400: {"model": ErrorResponse}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    return await respond(body, request, ChatWriter.of)


def offered_tools(body: ChatRequest) -> list[Tool]:
    """The functions that the model may ask for."""
    return [] if body.tool_choice == "none" else body.tools or []


def template_options(body: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template gets beside the messages; `defaults` are variables that requests may leave out."""
    return {
        **defaults,
        **(body.chat_template_kwargs or {}),
        "tools": [tool.model_dump(exclude_unset=True) for tool in offered_tools(body)] or None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
    }


def finish_reason(reason: str | None, called: bool) -> str | None:
    """Why a choice ended, in OpenAI's words: a model that stops after a call waits for what it gives."""
    return "tool_calls" if called and reason == "stop" else reason


class ChatWriter:
    """Writes the answer to one request.

    Args:
        responses: what it is written with.
        body: the request.
        prompt: token ids of the conversation.
    """

    def __init__(self, responses: ResponseContext, body: ChatRequest, prompt: list[int]) -> None:
        self._responses, self._body = responses, body
        tools = offered_tools(body)
        form = responses.tool_calls if tools else None
        self._reader = partial(ToolCallReader, form, tools) if form else None
        params = sampling_params(body, responses.defaults)
        if form:
            params = responses.codec.showing(params, opening_mark(form))
        self.job = Job(
            f"chatcmpl-{uuid.uuid4().hex}",
            [prompt],
            params,
            body.priority,
            body.cache_salt,
        )
        self.grammar: Grammar | None = None
        """Held here, it is compiled when the engine asks for it."""
        self.tally = Tally(self.job)
        self._created = int(time.time())
        self._logprobs = LogprobWriter(
            responses.codec, top=body.top_logprobs or 0, as_ids=body.return_tokens_as_token_ids
        )

    @classmethod
    async def of(cls, context: Context, body: ChatRequest) -> ChatWriter:
        """Renders, tokenises and checks everything that can be checked beforehand."""
        check_choices(context, body, 1)
        check_logprobs(context, body.top_logprobs, "top_logprobs")
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        special = body.add_special_tokens is True
        options = template_options(body, context.settings.default_chat_template_kwargs)
        prompt = await context.codec.encode_chat(messages, add_special_tokens=special, **options)
        check_size(context, [prompt], "messages")
        writer = cls(ResponseContext.of(context), body, prompt)
        writer.grammar = await check_form(context, writer.job.params)
        return writer

    def response(self, outputs: Sequence[RequestOutput]) -> ChatResponse:
        """The whole answer, from the finished output."""
        (output,) = outputs
        self.tally.latest[0] = output
        choices = []
        for each in output.outputs:
            message = ChatAnswer(role="assistant", content=each.text)
            calls: list[ToolCall] = []
            if self._reader is not None:
                shown, calls = self._reader().push(each.text, last=True)
                if calls:
                    message = ChatAnswer(role="assistant", content=shown or None, tool_calls=calls)
            reason = finish_reason(each.finish_reason, bool(calls))
            choice = ChatChoice(index=each.index, message=message, logprobs=None, finish_reason=reason)
            if each.logprobs is not None:
                choice.logprobs = self._logprobs.chat(each.token_ids, each.logprobs)
            if each.stop_reason is not None:
                choice.stop_reason = each.stop_reason
            if self._body.return_token_ids:
                choice.token_ids = each.token_ids
            choices.append(choice)
        response = ChatResponse(
            id=self.job.id, object="chat.completion", created=self._created, model=self._responses.model,
            choices=choices, usage=self.tally.usage(),
        )  # fmt: skip
        if self._body.return_token_ids:
            response.prompt_token_ids = list(self.job.prompts[0])
        return response

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The answer as events: the role first, then what is new, then why it ended."""
        tally, seen, readers = self.tally, set[int](), dict[int, ToolCallReader]()
        options = self._body.stream_options or StreamOptions()

        def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
            made = ChatChunk(
                id=self.job.id, object="chat.completion.chunk", created=self._created,
                model=self._responses.model, choices=choices,
            )  # fmt: skip
            if options.include_usage or options.continuous_usage_stats:
                made.usage = tally.usage() if options.continuous_usage_stats else None
            return made

        async for piece in stream(context, self.job, tally):
            if piece.choice not in seen:
                begin = chunk(
                    [ChatChunkChoice(index=piece.choice, delta=Delta(role="assistant", content=""), finish_reason=None)]
                )
                if self._body.return_token_ids and not seen:
                    begin.prompt_token_ids = list(self.job.prompts[0])
                seen.add(piece.choice)
                if self._reader is not None:
                    readers[piece.choice] = self._reader()
                yield event(begin)
            shown = self._choice(piece, readers.get(piece.choice))
            if shown.delta.model_fields_set or piece.finish_reason or piece.logprobs or self._body.return_token_ids:
                yield event(chunk([shown]))
        if options.include_usage:
            last = chunk([])
            last.usage = tally.usage()
            yield event(last)
        yield DONE

    def _choice(self, piece: ChoiceDelta, reader: ToolCallReader | None) -> ChatChunkChoice:
        text, calls = piece.text, list[ToolCall]()
        if reader is not None:
            text, calls = reader.push(text, last=piece.finish_reason is not None)
        # With nothing new to say the delta is empty, as in OpenAI's last event of a choice.
        delta = Delta(content=text) if text else Delta()
        if calls and reader is not None:
            first = reader.count - len(calls)
            delta.tool_calls = [ToolCallDelta(index=first + i, **dict(call)) for i, call in enumerate(calls)]
        reason = finish_reason(piece.finish_reason, reader is not None and reader.count > 0)
        choice = ChatChunkChoice(index=piece.choice, delta=delta, finish_reason=reason)
        if piece.logprobs:
            choice.logprobs = self._logprobs.chat(piece.token_ids, piece.logprobs)
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
        return choice
