"""`/v1/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate

from serving.api.http.apis.choices import Choice, ChoicesWriter
from serving.api.http.apis.sampling import sampling_params
from serving.api.http.context import ResponseContext
from serving.api.http.generation import ChoiceDelta, Job, UsageCounter
from serving.api.http.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from serving.engine.requests.output import RequestOutput, TokenLogprobs


class CompletionWriter(ChoicesWriter):
    """Writes the response to one request. `prompts`: the token ids of its prompts."""

    def __init__(
        self,
        context: ResponseContext,
        body: CompletionRequest,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
    ) -> None:
        params = sampling_params(request, context.settings.default_sampling)
        job = Job(f"cmpl-{uuid.uuid4().hex}", prompts, params, request.priority, request.cache_salt)
        # With max_tokens = 0 the engine still generates one token, which is not reported.
        tally = UsageCounter(job, with_output=request.max_tokens != 0)
        super().__init__(context, request, job, tally, top=request.logprobs or 0)
        self._body = body
        self._echoes = [self._echo(*each) for each in zip(request.prompts, prompts, strict=True)] if body.echo else []
        """The texts of the prompts, for `echo`."""
        self._offsets: dict[int, int] = {}
        """Characters of each choice's text that belong to the tokens reported so far."""
        self._begun: set[int] = set()
        """Choices of which there has been an event."""

    def _echo(self, prompt: str | list[int], token_ids: list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._context.codec.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)

    def _answer(self, choices: Sequence[Choice], *, whole: bool) -> CompletionResponse:
        return CompletionResponse(
            id=self.job.id, object="text_completion", created=self._created, model=self._context.model,
            choices=[each for each in choices if isinstance(each, CompletionChoice)],
        )  # fmt: skip

    def _events(self, piece: ChoiceDelta) -> Iterator[CompletionResponse]:
        first = self._index(piece) not in self._begun
        shown = self._choice(piece, whole=False)
        # The engine holds back text that may start a stop string or that ends within a character.
        if first or shown.text or shown.logprobs or piece.new.finished or self._body.return_token_ids:
            yield self._answer([shown], whole=False)

    def _index(self, piece: ChoiceDelta) -> int:
        return piece.prompt * self._body.n + piece.new.index

    def _choice(self, piece: ChoiceDelta, *, whole: bool) -> CompletionChoice:
        """Returns a choice, or its new output. The echo precedes its first output."""
        index = self._index(piece)
        first = index not in self._begun
        self._begun.add(index)
        new = piece.new
        tokens, text = new.token_ids, new.text
        tables: list[TokenLogprobs | None] = list(new.logprobs or ())
        if self._body.max_tokens == 0:
            tokens, text, tables = [], "", []
        echoed, prompt = "", []
        if self._body.echo and first:
            echoed, prompt = self._echoes[piece.prompt], [*self.job.prompts[piece.prompt]]
            tables = [*_prompt_tables(piece.output), *tables]
        choice = CompletionChoice(index=index, text=echoed + text, logprobs=None, finish_reason=new.finish_reason)
        if self._body.logprobs is not None and (prompt or tokens):
            choice.logprobs = self._written(index, [*prompt, *tokens], tables, echoed, len(prompt))
        if self._body.prompt_logprob_token_ids and first and new.index == 0:
            choice.prompt_logprobs = self._logprobs.prompt(_prompt_tables(piece.output))
        self._add_details(choice, piece, tokens)
        if self._body.return_token_ids and first:
            choice.prompt_token_ids = list(self.job.prompts[piece.prompt])
        return choice

    def _written(
        self, index: int, tokens: list[int], tables: list[TokenLogprobs | None], echoed: str, prompt: int
    ) -> CompletionLogprobs:
        """Returns the log-probabilities of `tokens`. The first `prompt` tokens are the prompt's, with the text
        `echoed`."""
        codec, offset = self._context.codec, self._offsets.get(index, 0)
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
