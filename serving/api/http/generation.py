"""A request of any API as one job for the engine, with the output of its choices and the tokens that it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.api.http.errors import ApiError
from serving.api.http.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage
from serving.engine.requests.output import CompletionOutput, RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.engine.structured.grammars import Grammar

MAX_VALUES = 1 << 21
"""Maximum number of values of log-probabilities and sampling masks in one response."""
MAX_EXPERT_BYTES = 1 << 28
"""Maximum bytes of routed experts in one response, unless those of one whole context are more."""
_ALTERNATIVES = 20
"""With so many alternatives, one choice of the longest context is always allowed."""


@dataclass
class Job:
    """One HTTP request: one or more prompts with the same parameters."""

    request: EngineRequest
    """For each prompt, which it does not have yet. `respond` adds the adapter, and replaces the client's salt by the
    salt for the prefix cache."""
    prompts: Sequence[Sequence[int]]
    grammar: Grammar | None = None
    """Keeps the compiled grammar alive until the engine requests it."""
    ignored: Sequence[str] = ()
    """Words of schemas that the response need not follow."""
    score_bytes: int = 0
    """Memory of the log-probabilities of the prompts."""
    with_output: bool = True
    """The response has the output, whose tokens count."""
    reasoning: Callable[[list[int]], int] | None = None
    """Counts the reasoning tokens of a choice."""
    latest: dict[int, RequestOutput] = field(default_factory=dict)
    """The output of each prompt so far, as a whole."""

    def check_size(self, max_model_len: int, vocab_size: int | None, expert_bytes: int = 0) -> None:
        """Checks how many values of log-probabilities and sampling masks (8 bytes each) and how many bytes of experts
        the response can have, and sets `score_bytes`. `expert_bytes`: those that the engine records of each token.

        Raises:
            ApiError: they are too many.
        """
        params, values, experts = self.request.params, 0, 0
        scored = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
        scored += len(params.prompt_logprob_token_ids or ())
        reported = 0 if params.logprobs is None else 1 + params.logprobs
        if params.return_sampling_mask:
            reported += -(-(vocab_size or 0) // 64)
        for prompt in self.prompts:
            room = max(max_model_len - len(prompt), 0)
            length = room if params.max_tokens is None else min(params.max_tokens, room)
            values += params.n * (len(prompt) * scored + length * reported)
            experts += params.n * (len(prompt) + length) * expert_bytes * self.request.return_experts
        most = max(MAX_VALUES, max_model_len * (1 + _ALTERNATIVES))
        most_experts = max(MAX_EXPERT_BYTES, max_model_len * expert_bytes)
        scores = next((name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None), "n")
        for count, allowed, what, fewer, param in (
            (experts, most_experts, "bytes of routed experts", "tokens or choices", "n"),
            (values, most, "values of log-probabilities and sampling masks", "tokens, choices or alternatives", scores),
        ):
            if count > allowed:
                raise ApiError(
                    400, f"the response could have {count:,} {what}: at most {allowed:,} are allowed; send fewer or "
                    f"shorter prompts, or ask for fewer {fewer}", param=param, code="response_too_large",
                )  # fmt: skip
        self.score_bytes = 8 * scored * sum(map(len, self.prompts))

    def add(self, prompt: int, new: RequestOutput) -> None:
        """Adds a delta of a prompt's output."""
        if prompt in self.latest:
            self.latest[prompt].extend(new)
        else:
            self.latest[prompt] = new.copy()

    @property
    def written(self) -> Counter[float | None]:
        """Prompt tokens that the request has added to the prefix cache, by the time of their marks."""
        return sum((Counter(output.cache_write_tokens) for output in self.latest.values()), Counter[float | None]())

    def usage(self) -> Usage:
        """Returns the numbers of tokens that the request has used."""
        prompt, outputs = sum(map(len, self.prompts)), self.latest.values()
        choices = [choice for output in outputs for choice in output.outputs]
        completion = sum(len(choice.token_ids) for choice in choices if self.with_output)
        drafts = [output.metrics.drafts for output in outputs if output.metrics is not None]
        cached = PromptTokensDetails(
            cached_tokens=sum(output.num_cached_tokens for output in outputs),
            cache_write_tokens=sum(self.written.values()),
        )
        usage = Usage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details=cached,
        )  # fmt: skip
        details = CompletionTokensDetails()
        if self.reasoning is not None:
            details.reasoning_tokens = sum(self.reasoning(choice.token_ids) for choice in choices)
        if any(each.drafted for each in drafts):
            details.accepted_prediction_tokens = sum(each.accepted for each in drafts)
            details.rejected_prediction_tokens = sum(each.wasted for each in drafts)
        if details.model_fields_set:
            usage.completion_tokens_details = details
        return usage


class ChoiceDelta(NamedTuple):
    """New output of one choice; all of it in a whole response."""

    prompt: int
    """Index of its prompt."""
    output: RequestOutput
    """The output of the prompt, for what choices share."""
    new: CompletionOutput

    @property
    def num_tokens(self) -> int:
        """Number of tokens with something to write: the new ones, and those of a prompt with log-probabilities."""
        return len(self.new.token_ids) + len(self.output.prompt_logprobs or ())


def whole(outputs: Sequence[RequestOutput], job: Job) -> list[ChoiceDelta]:
    """Returns each choice of the finished outputs of all prompts, as one delta. Updates `job`."""
    job.latest.update(enumerate(outputs))
    return [ChoiceDelta(index, output, choice) for index, output in enumerate(outputs) for choice in output.outputs]
