"""Copies log-probabilities of prompts from the results of steps to the outputs of requests."""

from __future__ import annotations

from serving.engine.requests.output import Logprob, token_logprobs
from serving.engine.steps.results import StepTokens
from serving.engine.steps.user_request import ChoiceState


def add_prompt_logprobs(settled: StepTokens) -> None:
    """Adds a step's log-probabilities of prompt tokens to the outputs that request them."""
    if settled.prefill is None or settled.prefill.prompt is None:
        return
    token, top_ids, top, of_ids = settled.prefill.prompt
    for row, begin in zip(settled.plan.prefill, settled.prompt_starts, strict=False):
        member: ChoiceState = row.request.user
        tables = member.parent.output.prompt_logprobs
        if not row.request.prompt_logprobs or tables is None:
            continue
        count = row.request.sampling.prompt_logprobs or 0
        given = row.request.sampling.prompt_logprob_token_ids or ()
        ids = member.parent.output.prompt_token_ids
        # Position 0 has no preceding token. Tokens after the prompt are output that is computed again after preemption.
        for position in range(max(row.length, 1), min(row.length + row.num_tokens, len(ids))):
            at = begin + position - row.length
            table = token_logprobs(ids[position], float(token[at]), top_ids[at, :count], top[at, :count])
            for other, value in zip(given, of_ids[at, : len(given)].tolist(), strict=True):
                table.setdefault(other, Logprob(value, None))
            tables[position] = table
