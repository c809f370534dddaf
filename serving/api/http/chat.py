"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.answering import answer, ignored_header
from serving.api.http.context import Context, context_of
from serving.api.http.generation import Job, Piece, Tally, Voice, check_form, check_size, run, stream
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
from serving.engine.output import RequestOutput

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses={400: {"model": ErrorResponse}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    context = context_of(request)
    context.check(body.model)
    writer = await until_gone(request.receive, ChatWriter.of(context, body))
    headers, request.state.tally = ignored_header(body), writer.tally
    if body.stream:
        events = await until_gone(request.receive, start(writer.events(context)))
        return EventStream(events, headers)
    outputs = await until_gone(request.receive, run(context, writer.job))
    return answer(writer.response(outputs), headers)


def template_options(body: ChatRequest) -> dict[str, Any]:
    """What the chat template gets beside the messages."""
    tools = None if body.tool_choice == "none" else body.tools
    return {
        **(body.chat_template_kwargs or {}),
        "tools": [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
    }


class ChatWriter:
    """Writes the answer to one request.

    Args:
        voice: what it is written with.
        body: the request.
        prompt: token ids of the conversation.
    """

    def __init__(self, voice: Voice, body: ChatRequest, prompt: list[int]) -> None:
        self._voice, self._body = voice, body
        self.job = Job(
            f"chatcmpl-{uuid.uuid4().hex}",
            [prompt],
            sampling_params(body, voice.defaults),
            body.priority,
            body.cache_salt,
        )
        self.tally = Tally(self.job)
        self._created = int(time.time())
        self._logprobs = LogprobWriter(voice.codec, top=body.top_logprobs or 0, as_ids=body.return_tokens_as_token_ids)

    @classmethod
    async def of(cls, context: Context, body: ChatRequest) -> ChatWriter:
        """Renders, tokenises and checks everything that can be checked beforehand."""
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        special = body.add_special_tokens is True
        prompt = await context.codec.encode_chat(messages, add_special_tokens=special, **template_options(body))
        check_size(context, body, [prompt])
        writer = cls(Voice.of(context), body, prompt)
        await check_form(context, writer.job.params)
        return writer

    def response(self, outputs: Sequence[RequestOutput]) -> ChatResponse:
        """The whole answer, from the finished output."""
        (output,) = outputs
        self.tally.latest[0] = output
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
            id=self.job.id, object="chat.completion", created=self._created, model=self._voice.model,
            choices=choices, usage=self.tally.usage(),
        )  # fmt: skip
        if self._body.return_token_ids:
            response.prompt_token_ids = list(self.job.prompts[0])
        return response

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The answer as events: the role first, then what is new, then why it ended."""
        tally, seen = self.tally, set[int]()
        options = self._body.stream_options or StreamOptions()

        def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
            made = ChatChunk(
                id=self.job.id, object="chat.completion.chunk", created=self._created,
                model=self._voice.model, choices=choices,
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
