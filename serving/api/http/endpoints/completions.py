"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.connection.streaming import DONE, event
from serving.api.http.context import Context
from serving.api.http.endpoints.endpoint import respond
from serving.api.http.generation import (
    ChoiceDelta,
    Job,
    ResponseContext,
    UsageCounter,
    check_choices,
    check_form,
    check_logprobs,
    check_size,
    stream,
)
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.protocol.common import EncodedArray, ErrorResponse, StreamOptions
from serving.api.http.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from serving.api.http.sampling import sampling_params
from serving.engine.requests.output import RequestOutput, TokenLogprobs
from serving.engine.structured.grammars import Grammar

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", response_model=CompletionResponse, responses={400: {"model": ErrorResponse}})
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several; with `stream` as server-sent events."""
    return await respond(body, request, CompletionWriter.of)


class CompletionWriter:
    """Writes the response to one request.

    Args:
        responses: the server's codec, model name, defaults and formats.
        body: the request.
        prompts: its prompts' token ids.
        echoes: the prompts' texts, for `echo`.
    """

    def __init__(
        self, responses: ResponseContext, body: CompletionRequest, prompts: Sequence[list[int]], echoes: Sequence[str]
    ):
        self._responses, self._body, self._echoes = responses, body, echoes
        self.job = Job(
            f"cmpl-{uuid.uuid4().hex}",
            prompts,
            sampling_params(body, responses.defaults),
            body.priority,
            body.cache_salt,
        )
        # With max_tokens = 0 the engine still generates one token, which is not reported.
        self.grammar: Grammar | None = None
        """Keeps the compiled grammar alive until the engine requests it."""
        self.tally = UsageCounter(self.job, with_output=body.max_tokens != 0)
        self._created = int(time.time())
        self._logprobs = LogprobWriter(responses.codec, top=body.logprobs or 0, as_ids=body.return_tokens_as_token_ids)
        self._offsets: dict[int, int] = {}
        """Characters of each choice's text that belong to the tokens reported so far."""

    @classmethod
    async def of(cls, context: Context, body: CompletionRequest) -> CompletionWriter:
        """Tokenises the prompts and checks the request before generation."""
        check_choices(context, body, len(body.prompts))
        check_logprobs(context, body.logprobs, "logprobs")
        codec, special = context.codec, body.add_special_tokens is not False
        prompts = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
        if not prompts:
            texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
            prompts = await codec.encode(texts, add_special_tokens=special)
        check_size(context, prompts, "prompt")
        echoes: list[str] = []
        for prompt in body.prompts if body.echo else ():
            if isinstance(prompt, str):
                echoes.append(prompt)
            else:
                echoes.append("" if codec.tokenizer is None else await codec.decode(prompt))
        writer = cls(ResponseContext.of(context, body.model), body, prompts, echoes)
        writer.grammar = await check_form(context, writer.job.params)
        return writer

    def response(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """Returns the whole response, from the finished outputs of all prompts."""
        self.tally.latest.update(enumerate(outputs))
        choices = [
            self._choice(
                ChoiceDelta(
                    index, choice.index, output, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason,
                    choice.stop_reason,
                ),
                first=True,
            )
            for index, output in enumerate(outputs)
            for choice in output.outputs
        ]  # fmt: skip
        response = self._envelope(choices)
        response.usage = self.tally.usage()
        return response

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """Yields the response as events."""
        tally, seen = self.tally, set[int]()
        options = self._body.stream_options or StreamOptions()
        async for piece in stream(context, self.job, tally):
            index = piece.prompt * self._body.n + piece.choice
            first = index not in seen
            shown = self._choice(piece, first=first)
            if not (first or shown.text or shown.logprobs or piece.finish_reason or self._body.return_token_ids):
                continue  # the engine holds back text that may start a stop string or that ends within a character
            seen.add(index)
            chunk = self._envelope([shown])
            if options.include_usage or options.continuous_usage_stats:
                chunk.usage = tally.usage() if options.continuous_usage_stats else None
            yield event(chunk)
        if options.include_usage:
            last = self._envelope([])
            last.usage = tally.usage()
            yield event(last)
        yield DONE

    def _envelope(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=self.job.id, object="text_completion", created=self._created, model=self._responses.model,
            choices=choices,
        )  # fmt: skip

    def _choice(self, piece: ChoiceDelta, *, first: bool) -> CompletionChoice:
        """Returns a choice, or its new output. The `first` time, the echo precedes it."""
        index = piece.prompt * self._body.n + piece.choice
        tokens, text = piece.token_ids, piece.text
        tables: list[TokenLogprobs | None] = list(piece.logprobs or ())
        if self._body.max_tokens == 0:
            tokens, text, tables = [], "", []
        shown = list(tokens)
        if self._body.echo and first:
            text = self._echoes[piece.prompt] + text
            shown = [*self.job.prompts[piece.prompt], *shown]
            tables = [*_prompt_tables(piece.output), *tables]
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=piece.finish_reason)
        if self._body.logprobs is not None and shown:
            echoed = self._echoes[piece.prompt] if self._body.echo and first else ""
            choice.logprobs = self._written(index, shown, tables, echoed, len(shown) - len(tokens))
        if self._body.return_sampling_mask and piece.finish_reason is not None and self._body.max_tokens != 0:
            choice.sampling_mask = EncodedArray.of(piece.output.outputs[piece.choice].sampling_mask)
        if self._body.prompt_logprob_token_ids and first and piece.choice == 0:
            choice.prompt_logprobs = self._logprobs.prompt(_prompt_tables(piece.output))
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = tokens
            if piece.finish_reason is not None:
                whole = piece.output.outputs[piece.choice]
                choice.weights_versions = whole.weights_versions
                choice.routed_experts = EncodedArray.of(whole.routed_experts)
            if first:
                choice.prompt_token_ids = list(self.job.prompts[piece.prompt])
        return choice

    def _written(
        self, index: int, tokens: list[int], tables: list[TokenLogprobs | None], echoed: str, prompt: int
    ) -> CompletionLogprobs:
        """Returns the log-probabilities of `tokens`. The first `prompt` tokens are the prompt's, with the text
        `echoed`."""
        codec, offset = self._responses.codec, self._offsets.get(index, 0)
        sizes = [len(codec.token(token)) for token in tokens]
        for i in codec.hidden(tokens[:prompt], echoed):
            sizes[i] = 0
        if self.job.params.skip_special_tokens:
            written = list(zip(tokens, sizes, strict=True))[prompt:]
            sizes[prompt:] = [0 if codec.is_special(token) else size for token, size in written]
        offsets = list(accumulate(sizes, initial=offset))
        self._offsets[index] = offsets.pop()
        return self._logprobs.completion(tokens, tables, offsets)


def _prompt_tables(output: RequestOutput) -> list[TokenLogprobs | None]:
    return list(output.prompt_logprobs or ())
