"""Generation from prompts and parameters, whole or streamed; shared by all APIs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.api.http.connection.keys import client_id
from serving.api.http.connection.streaming import gather, merge
from serving.api.http.context import Context
from serving.api.http.errors import ApiError
from serving.api.http.parsing.reasoning import ReasoningMarks
from serving.api.http.protocol.common import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from serving.api.http.settings import ToolCallForm
from serving.api.http.text import TextCodec, check_fits
from serving.engine.requests.output import RequestOutput, TokenLogprobs
from serving.engine.requests.request import EngineRequest, LoRARequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.grammars import Grammar


@dataclass(frozen=True)
class ResponseContext:
    """Model and settings for writing responses, for a server and for batch files."""

    codec: TextCodec
    model: str
    """Name of the model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters for fields that requests omit."""
    tool_calls: ToolCallForm | None = None
    """Tool-call format; None leaves them in the text."""
    reasoning: ReasoningMarks | None = None
    """Marks around reasoning; None leaves it in the text."""

    @classmethod
    def of(cls, context: Context, model: str | None) -> ResponseContext:
        """Returns the context of a server, for a request for `model`."""
        name, defaults = context.name_of(model), context.settings.default_sampling
        return cls(context.codec, name, defaults, context.tool_calls, context.reasoning)


@dataclass
class Job:
    """One HTTP request: one or more prompts with the same parameters."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    """The client's salt, until `respond` replaces it by the salt for the prefix cache."""
    lora_request: LoRARequest | None = None


@dataclass
class ChoiceDelta:
    """New output of one choice. `prompt` and `choice` are its indices."""

    prompt: int
    choice: int
    output: RequestOutput
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class UsageCounter:
    """Usage so far, from the output of each prompt."""

    job: Job
    with_output: bool = True
    reasoning: Callable[[list[int]], int] | None = None
    """Counts the reasoning tokens of a choice."""
    latest: dict[int, RequestOutput] = field(default_factory=dict)
    """The output of each prompt so far, as a whole."""

    def add(self, prompt: int, new: RequestOutput) -> RequestOutput:
        """Adds a delta of a prompt's output. Returns the whole output so far."""
        if prompt in self.latest:
            self.latest[prompt].extend(new)
        else:
            self.latest[prompt] = new.copy()
        return self.latest[prompt]

    def usage(self) -> Usage:
        """Returns the numbers of tokens that the request has used."""
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
    """Checks the number of choices.

    Raises:
        ApiError: the request has more than `max_choices` choices.
    """
    choices, most = prompts * request.n, context.settings.max_choices
    if choices > most:
        raise ApiError(400, f"{choices} choices (prompts times n): at most {most} are allowed", param="n")


def check_logprobs(context: Context, requested: int | None, param: str) -> None:
    """Checks the number of alternatives in log-probabilities.

    Raises:
        ApiError: `requested` is more than `max_logprobs`.
    """
    most = context.settings.max_logprobs
    if requested is not None and requested > most:
        raise ApiError(400, f"{param} is {requested}: at most {most} are allowed", param=param)


def check_size(context: Context, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Checks the prompts before any of them runs.

    Raises:
        ApiError: a prompt is empty or too long, or contains a token id beyond the vocabulary.
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
    """Compiles a request's grammar outside the event loop. The engine reuses it while the caller holds a reference.

    Raises:
        RequestError: the grammar is invalid or too expensive to compile, or too many compilations are pending (retry).
    """
    form, grammars = params.structured_outputs, context.engine.engine.grammars
    if form is None or grammars is None:
        return None
    # Hashing a long schema takes time, as does a trial compilation. A known grammar does not wait for trials.
    pending = await asyncio.to_thread(grammars.submit, form, client_id())
    return await asyncio.shield(asyncio.wrap_future(pending))  # other requests may wait for the same future


async def run(context: Context, job: Job) -> list[RequestOutput]:
    """Returns the finished outputs of all prompts, in order."""

    async def last(index: int) -> RequestOutput:
        async with contextlib.aclosing(_one(context, job, index, live=False)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise AssertionError("an iteration ends with a finished output")

    return await gather([last(index) for index in range(len(job.prompts))])


async def stream(context: Context, job: Job, tally: UsageCounter) -> AsyncGenerator[ChoiceDelta, None]:
    """Yields new output of all choices as it arrives. Updates `tally`."""
    streams = [_one(context, job, index, live=True) for index in range(len(job.prompts))]
    async with contextlib.aclosing(merge(streams)) as outputs:
        async for index, new in outputs:
            whole = tally.add(index, new)
            for choice in new.outputs:
                if choice.token_ids or choice.text or choice.finished:
                    yield ChoiceDelta(
                        index, choice.index, whole, choice.text, choice.token_ids, choice.logprobs,
                        choice.finish_reason, choice.stop_reason,
                    )  # fmt: skip


async def _one(context: Context, job: Job, index: int, *, live: bool) -> AsyncGenerator[RequestOutput, None]:
    """Runs one prompt, timed for the metrics and the traces. Yields deltas with `live`, else the finished output."""
    observe = context.metrics.request(len(job.prompts[index]))
    name = job.id if len(job.prompts) == 1 else f"{job.id}-{index}"
    request = EngineRequest(
        name,
        {"prompt_token_ids": job.prompts[index]},
        job.params,
        priority=job.priority,
        cache_salt=job.cache_salt,
        client=client_id(),
        batch_id=f"{job.id}-0" if len(job.prompts) > 1 else None,
        live=live,
        lora_request=job.lora_request,
    )
    with context.traces.request(name, len(job.prompts[index]), job.params) as note:
        async with contextlib.aclosing(context.engine.stream(request)) as each:
            async for output in each:
                note(output)
                observe(output, time.monotonic())
                yield output
