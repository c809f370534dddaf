"""From prompts and parameters to pieces of output: what completions and chat have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.api.http.context import Context
from serving.api.http.errors import ApiError
from serving.api.http.keys import client_id
from serving.api.http.protocol.common import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from serving.api.http.reasoning import ReasoningMarks
from serving.api.http.settings import ToolCallForm
from serving.api.http.streaming import gather, merge
from serving.api.http.text import TextCodec, check_fits
from serving.engine.grammars import Grammar
from serving.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from serving.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class ResponseContext:
    """What writing an answer needs, for a server's clients and for batch files."""

    codec: TextCodec
    model: str
    """What the model is called."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that do not have them."""
    tool_calls: ToolCallForm | None = None
    """Tool-call format; None leaves them in the text."""
    reasoning: ReasoningMarks | None = None
    """Marks around reasoning; None leaves it in the text."""

    @classmethod
    def of(cls, context: Context) -> ResponseContext:
        """A server's."""
        return cls(
            context.codec, context.model_name, context.settings.default_sampling, context.tool_calls, context.reasoning
        )


@dataclass
class Job:
    """One HTTP request as the engine's: several prompts under the same parameters."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    """The client's, until `respond` puts the one in its place that the prefix cache is asked with."""


@dataclass
class ChoiceDelta:
    """What is new of one choice. `prompt` and `choice` say which."""

    prompt: int
    choice: int
    output: RequestOutput
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class _Cursor:
    """How much of one choice has been sent."""

    characters: int = 0
    tokens: int = 0
    finished: bool = False

    def take(self, prompt: int, output: RequestOutput, choice: CompletionOutput) -> ChoiceDelta | None:
        """What has come since the last call; None for nothing."""
        if self.finished or (
            len(choice.text) == self.characters and len(choice.token_ids) == self.tokens and not choice.finished
        ):
            return None
        piece = ChoiceDelta(
            prompt,
            choice.index,
            output,
            choice.text[self.characters :],
            choice.token_ids[self.tokens :],
            None if choice.logprobs is None else choice.logprobs[self.tokens :],
            choice.finish_reason,
            choice.stop_reason,
        )
        self.characters, self.tokens, self.finished = len(choice.text), len(choice.token_ids), choice.finished
        return piece


@dataclass
class Tally:
    """Usage so far, from the latest output of each prompt."""

    job: Job
    with_output: bool = True
    reasoning: Callable[[list[int]], int] | None = None
    """Counts the tokens of reasoning among a choice's."""
    latest: dict[int, RequestOutput] = field(default_factory=dict)

    def usage(self) -> Usage:
        """What the request has used."""
        prompt = sum(map(len, self.job.prompts))
        outputs = list(self.latest.values())
        completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs if self.with_output)
        drafts = [output.metrics.drafts for output in outputs if output.metrics is not None]
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(o.num_cached_tokens for o in outputs)),
        )
        details = CompletionTokensDetails()
        if self.reasoning is not None:
            choices = (choice for output in outputs for choice in output.outputs)
            details.reasoning_tokens = sum(self.reasoning(choice.token_ids) for choice in choices)
        if any(each.drafted for each in drafts):
            details.accepted_prediction_tokens = sum(each.accepted for each in drafts)
            details.rejected_prediction_tokens = sum(each.wasted for each in drafts)
        if details.model_fields_set:
            usage.completion_tokens_details = details
        return usage


def check_choices(context: Context, request: GenerationRequest, prompts: int) -> None:
    """Refuse a request for too many outputs.

    Raises:
        ApiError: it is one.
    """
    choices, most = prompts * request.n, context.settings.max_choices
    if choices > most:
        raise ApiError(400, f"{choices} choices (prompts times n): at most {most} are allowed", param="n")


def check_logprobs(context: Context, asked: int | None, param: str) -> None:
    """Refuse a request for more alternatives than the server gives.

    Raises:
        ApiError: it is one.
    """
    most = context.settings.max_logprobs
    if asked is not None and asked > most:
        raise ApiError(400, f"{param} is {asked}: at most {most} are allowed", param=param)


def check_size(context: Context, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Refuse prompts that can never run, before any of them does.

    Raises:
        ApiError: an empty or too long prompt, a token id beyond the vocabulary.
    """
    engine = context.engine.engine
    for ids in prompts:
        if not ids:
            raise ApiError(400, "the prompt is empty", param=param)
        check_fits(len(ids), engine.max_model_len, param)
        if max(ids) >= engine.vocab_size:
            bad = next(i for i in ids if i >= engine.vocab_size)
            raise ApiError(400, f"token id {bad} is not in the vocabulary (0 to {engine.vocab_size - 1})", param=param)


async def check_form(context: Context, params: SamplingParams) -> Grammar | None:
    """Compile the grammar of a request outside the event loop. The engine reuses it while the caller holds it.

    Raises:
        RequestError: it is broken, takes too much to compile, or, to be tried again, too many others do.
    """
    form, grammars = params.structured_outputs, context.engine.engine.grammars
    if form is None or grammars is None:
        return None
    # The key of a long schema takes a while, as does a trial; a grammar that is known does not wait behind trials.
    pending = await asyncio.to_thread(grammars.submit, form, client_id())
    return await asyncio.shield(asyncio.wrap_future(pending))  # others may wait for the same


async def run(context: Context, job: Job) -> list[RequestOutput]:
    """The finished outputs of all prompts, in their order."""

    async def last(index: int) -> RequestOutput:
        async with contextlib.aclosing(_one(context, job, index, live=False)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise AssertionError("an iteration ends with a finished output")

    return await gather([last(index) for index in range(len(job.prompts))])


async def stream(context: Context, job: Job, tally: Tally) -> AsyncGenerator[ChoiceDelta, None]:
    """Pieces of all choices as they come; `tally` is kept up to date."""
    cursors: dict[tuple[int, int], _Cursor] = {}
    streams = [_one(context, job, index, live=True) for index in range(len(job.prompts))]
    async with contextlib.aclosing(merge(streams)) as outputs:
        async for index, output in outputs:
            tally.latest[index] = output
            for choice in output.outputs:
                piece = cursors.setdefault((index, choice.index), _Cursor()).take(index, output, choice)
                if piece is not None:
                    yield piece


async def _one(context: Context, job: Job, index: int, *, live: bool) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of one prompt, timed for the metrics and the traces."""
    observe = context.metrics.request(len(job.prompts[index]))
    name = job.id if len(job.prompts) == 1 else f"{job.id}-{index}"
    outputs = context.engine.generate(
        {"prompt_token_ids": job.prompts[index]},
        job.params,
        name,
        priority=job.priority,
        cache_salt=job.cache_salt,
        client=client_id(),
        batch_id=f"{job.id}-0" if len(job.prompts) > 1 else None,
        live=live,
    )
    with context.traces.request(name, len(job.prompts[index]), job.params) as note:
        async with contextlib.aclosing(outputs) as each:
            async for output in each:
                note(output)
                observe(output, time.monotonic())
                yield output
