"""The results of a step on the host: outputs of its programs, and the tokens of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from mamba_jax.batch import PromptLogprobs, StepOutput
from serving.core import DecodeRow, PrefillRow, Request, RowResult, StepPlan
from serving.engine.requests.output import Logprob, TokenLogprobs, token_logprobs


class StateError(RuntimeError):
    """`debug_state` detected that a row read a slot that does not contain the row's state: a bug in the engine."""


@dataclass
class HostOutput:
    """One program's results as host arrays. Log-probabilities are fetched only if a row needs them."""

    tokens: np.ndarray
    """[rows, H]; -1 = none."""
    finite: np.ndarray
    """[rows]: whether the logits were finite."""
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    sampling_mask: np.ndarray | None = None
    """[rows, H, bytes]: the tokens that each token could have been; fetched only if a row requests them."""
    drafted: list[int] = field(default_factory=list)
    """Number of drafts verified for each row; empty for programs without drafts."""
    proposed: np.ndarray | None = None
    """[rows, K]: drafts for each row's next step, -1 = none; fetched only if the host needs them for some row."""
    prompt: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None
    """For each packed prompt token: its log-probability, the ids of the likeliest tokens, their log-probabilities, and
    those of the ids that its row requests (no columns if no row requests ids)."""

    def tables(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Returns for each of a row's tokens its log-probability and those of the `count` likeliest tokens."""
        assert self.logprobs is not None
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        return [
            token_logprobs(
                token, float(self.logprobs[row, i]), self.top_ids[row, i, :count], self.top_logprobs[row, i, :count]
            )
            for i, token in enumerate(tokens)
        ]

    def emitted(self, count: int) -> list[list[int]]:
        """Returns the tokens of the first `count` rows."""
        return [[token for token in row if token >= 0] for row in self.tokens[:count].tolist()]


@dataclass
class StepTokens:
    """The results of one step: tokens by request, and the arrays with the log-probabilities."""

    emitted: list[RowResult]
    plan: StepPlan
    decode: HostOutput | None
    prefill: HostOutput | None
    not_finite: list[Request]
    """Requests that ended because their logits were NaN or infinite. None of their states are published."""
    prompt_starts: list[int] = field(default_factory=list)
    """Position of each prefill row's first token in the packed tokens."""

    def place(self, row: DecodeRow | PrefillRow) -> tuple[HostOutput, int]:
        """Returns the results that contain a row, and the row's index in them."""
        rows: Sequence[DecodeRow | PrefillRow] = self.plan.decode if isinstance(row, DecodeRow) else self.plan.prefill
        lines = self.decode if isinstance(row, DecodeRow) else self.prefill
        assert lines is not None
        return lines, next(i for i, other in enumerate(rows) if other is row)

    def add_prompt_logprobs(self) -> None:
        """Adds the log-probabilities of prompt tokens to the outputs of the requests that asked for them."""
        if self.prefill is None or self.prefill.prompt is None:
            return
        token, top_ids, top, of_ids = self.prefill.prompt
        for row, begin in zip(self.plan.prefill, self.prompt_starts, strict=False):
            output, params = row.request.user.parent.output, row.request.sampling
            tables, ids = output.prompt_logprobs, output.prompt_token_ids
            if not row.request.prompt_logprobs or tables is None:
                continue
            count, given = params.prompt_logprobs or 0, params.prompt_logprob_token_ids or ()
            # Position 0 has no preceding token. Tokens after the prompt are output that is computed again after
            # preemption.
            for position in range(max(row.length, 1), min(row.length + row.num_tokens, len(ids))):
                at = begin + position - row.length
                table = token_logprobs(ids[position], float(token[at]), top_ids[at, :count], top[at, :count])
                for other, value in zip(given, of_ids[at, : len(given)].tolist(), strict=True):
                    table.setdefault(other, Logprob(value, None))
                tables[position] = table


def start_reading(output: StepOutput | None, rows: Sequence[DecodeRow | PrefillRow]) -> None:
    """Starts to copy the arrays that `read_results` needs for these rows, without waiting."""
    if output is None:
        return
    output.tokens.copy_to_host_async()
    output.finite.copy_to_host_async()
    if output.num_drafts is not None:
        output.num_drafts.copy_to_host_async()
    if any(row.request.sampling.logprobs is not None for row in rows):
        for array in (output.logprobs, output.top_ids, output.top_logprobs):
            array.copy_to_host_async()
    for wanted in (_wanted_proposals(output, rows), _wanted_mask(output, rows)):
        if wanted is not None:
            wanted.copy_to_host_async()


def read_results(
    output: StepOutput | None, rows: Sequence[DecodeRow | PrefillRow], *, check_tags: bool
) -> HostOutput | None:
    """Waits for a program's results. Returns those that `rows`, the program's first rows, need.

    Raises:
        StateError: `check_tags` is set and a row has read the state of another row.
    """
    if output is None:
        return None
    lines = HostOutput(np.asarray(output.tokens), np.asarray(output.finite))
    if output.num_drafts is not None:
        lines.drafted = np.asarray(output.num_drafts)[: len(rows)].tolist()
    if any(row.request.sampling.logprobs is not None for row in rows):
        lines.logprobs, lines.top_ids, lines.top_logprobs = (
            np.asarray(x) for x in (output.logprobs, output.top_ids, output.top_logprobs)
        )
    proposed = _wanted_proposals(output, rows)
    if proposed is not None:
        lines.proposed = np.asarray(proposed)
    mask = _wanted_mask(output, rows)
    if mask is not None:
        lines.sampling_mask = np.asarray(mask)
    prompt: PromptLogprobs | None = output.prompt_logprobs
    scored = [row.request.sampling for row in rows if row.request.prompt_logprobs]
    if prompt is not None and scored:
        token, top_ids, top = (np.asarray(x) for x in (prompt.token, prompt.top_ids, prompt.top))
        given = any(params.prompt_logprob_token_ids for params in scored)
        lines.prompt = token, top_ids, top, np.asarray(prompt.of_ids) if given else np.zeros((len(token), 0))
    if check_tags and bool(output.tag_error):
        raise StateError("a row has read a state slot that does not hold the state after its own tokens")
    return lines


def _wanted_proposals(output: StepOutput, rows: Sequence[DecodeRow | PrefillRow]) -> jax.Array | None:
    """Returns the drafts for the next step if the host needs them for one of these rows."""
    return output.proposed if any(row.request.lockstep for row in rows) else None


def _wanted_mask(output: StepOutput, rows: Sequence[DecodeRow | PrefillRow]) -> jax.Array | None:
    """Returns the sampling masks if one of these rows requests them."""
    return output.sampling_mask if any(row.request.sampling.return_sampling_mask for row in rows) else None


def not_finite(lines: HostOutput | None, rows: Sequence[DecodeRow | PrefillRow]) -> list[Request]:
    """Returns the unfinished requests with NaN or infinite logits, which cannot continue."""
    if lines is None or lines.finite[: len(rows)].all():
        return []
    broken = [row.request for row, finite in zip(rows, lines.finite, strict=False) if not finite]
    return [request for request in broken if not request.finished]
