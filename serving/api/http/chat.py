"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.answering import answer, ignored_header
from serving.api.http.context import Context, context_of
from serving.api.http.generation import Job, Piece, Tally, check_form, check_size, run, stream
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.protocol.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
    Delta,
)
from serving.api.http.protocol.common import ErrorResponse, StreamOptions
from serving.api.http.sampling import sampling_params
from serving.api.http.streaming import DONE, EventStream, event, start, until_gone

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses={400: {"model": ErrorResponse}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    context = context_of(request)
    context.check(body.model)
    writer = await until_gone(request.receive, _Writer.of(context, body))
    headers = ignored_header(body)
    if body.stream:
        events = await until_gone(request.receive, start(writer.events()))
        return EventStream(events, headers)
    return answer(request, await until_gone(request.receive, writer.response()), headers)


def template_options(body: ChatRequest) -> dict[str, Any]:
    """What the chat template gets beside the messages."""
    tools = None if body.tool_choice == "none" else body.tools
    return {
        **(body.chat_template_kwargs or {}),
        "tools": [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
    }


class _Writer:
    """Writes the answer to one request."""

    def __init__(self, context: Context, body: ChatRequest, prompt: list[int]) -> None:
        self._context, self._body = context, body
        self.job = Job(
            f"chatcmpl-{uuid.uuid4().hex}",
            [prompt],
            sampling_params(body, context.settings.default_sampling),
            body.priority,
            body.cache_salt,
        )
        self._created = int(time.time())
        self._logprobs = LogprobWriter(
            context.codec, top=body.top_logprobs or 0, as_ids=body.return_tokens_as_token_ids
        )

    @classmethod
    async def of(cls, context: Context, body: ChatRequest) -> _Writer:
        """Renders, tokenises and checks everything that can be checked beforehand."""
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        special = body.add_special_tokens is True
        prompt = await context.codec.encode_chat(messages, add_special_tokens=special, **template_options(body))
        check_size(context, body, [prompt])
        writer = cls(context, body, prompt)
        await check_form(context, writer.job.params)
        return writer

    async def response(self) -> ChatResponse:
        """The whole answer."""
        (output,) = await run(self._context, self.job)
        choices = []
        for each in output.outputs:
            choice = ChatChoice(
                index=each.index,
                message=ChatAnswer(role="assistant", content=each.text),
                logprobs=None,
                finish_reason=each.finish_reason,
            )
            if each.logprobs is not None:
                choice.logprobs = self._logprobs.chat(each.token_ids, each.logprobs)
            if each.stop_reason is not None:
                choice.stop_reason = each.stop_reason
            if self._body.return_token_ids:
                choice.token_ids = each.token_ids
            choices.append(choice)
        response = ChatResponse(
            id=self.job.id, object="chat.completion", created=self._created, model=self._context.model_name,
            choices=choices, usage=Tally(self.job, latest={0: output}).usage(),
        )  # fmt: skip
        if self._body.return_token_ids:
            response.prompt_token_ids = list(self.job.prompts[0])
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: the role first, then what is new, then why it ended."""
        tally, seen = Tally(self.job), set[int]()
        options = self._body.stream_options or StreamOptions()

        def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
            made = ChatChunk(
                id=self.job.id, object="chat.completion.chunk", created=self._created,
                model=self._context.model_name, choices=choices,
            )  # fmt: skip
            if options.include_usage or options.continuous_usage_stats:
                made.usage = tally.usage() if options.continuous_usage_stats else None
            return made

        async for piece in stream(self._context, self.job, tally):
            if piece.choice not in seen:
                begin = chunk(
                    [ChatChunkChoice(index=piece.choice, delta=Delta(role="assistant", content=""), finish_reason=None)]
                )
                if self._body.return_token_ids and not seen:
                    begin.prompt_token_ids = list(self.job.prompts[0])
                seen.add(piece.choice)
                yield event(begin)
            if piece.text or piece.finish_reason or piece.logprobs or self._body.return_token_ids:
                yield event(chunk([self._choice(piece)]))
        if options.include_usage:
            last = chunk([])
            last.usage = tally.usage()
            yield event(last)
        yield DONE

    def _choice(self, piece: Piece) -> ChatChunkChoice:
        # With nothing new to say the delta is empty, as in OpenAI's last event of a choice.
        delta = Delta(content=piece.text) if piece.text else Delta()
        choice = ChatChunkChoice(index=piece.choice, delta=delta, finish_reason=piece.finish_reason)
        if piece.logprobs:
            choice.logprobs = self._logprobs.chat(piece.token_ids, piece.logprobs)
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
        return choice
