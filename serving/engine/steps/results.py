"""A dispatched step: its results on the device, then on the host, then by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mamba_jax.batch import PromptLogprobs, StepOutput
from serving.core.planning.plan import DecodeRow, Row, RowResult, StepPlan, StepResult
from serving.core.requests.request import Request
from serving.core.scheduler import Scheduler
from serving.engine.requests.output import PromptScores, TokenLogprobs, token_logprobs


class StateError(RuntimeError):
    """`debug_state` detected that a row read a slot that does not contain the row's state: a bug in the engine."""


@dataclass
class HostOutput:
    """One program's results as host arrays. Log-probabilities are fetched only if a row needs them."""

    rows: Sequence[Row]
    """The program's rows, without padding."""
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """[rows, H]; -1 = none."""
    finite: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
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

    def emitted(self) -> list[list[int]]:
        """Returns the tokens of the rows."""
        return [[token for token in row if token >= 0] for row in self.tokens[: len(self.rows)].tolist()]

    def not_finite(self) -> list[Request]:
        """Returns the unfinished requests with NaN or infinite logits, which cannot continue."""
        if self.finite[: len(self.rows)].all():
            return []
        broken = [row.request for row, finite in zip(self.rows, self.finite, strict=False) if not finite]
        return [request for request in broken if not request.finished]

    def take_proposals(self) -> None:
        """Records the drafts that the program left in the seats of rows with a grammar.

        The drafts stay in the seats until the row's next step verifies them, even if the row skips steps before.
        """
        if self.proposed is None:
            return
        for row, proposed in zip(self.rows, self.proposed.tolist(), strict=False):
            if row.request.lockstep:
                row.request.user.proposed = proposed


@dataclass
class DispatchedStep:
    """A dispatched step with its own outputs, so that late results are never matched with another batch."""

    plan: StepPlan
    begun: float
    """Time of the dispatch, by `perf_counter`."""
    compiled: int
    """Number of programs compiled before the dispatch."""
    outputs: list[StepOutput | None] = field(default_factory=lambda: [None, None])
    """Of the program of decode rows and of that of prefill rows, until they are read."""
    decode: HostOutput = field(init=False)
    """The results of the decode rows, once they are read."""
    prefill: HostOutput = field(init=False)
    emitted: list[RowResult] = field(init=False)
    """The tokens by request, once the step is settled."""
    not_finite: list[Request] = field(init=False)
    """Requests that ended because their logits were NaN or infinite. None of their states are published."""

    def start_reading(self) -> None:
        """Starts to copy the arrays that `read` needs, without waiting."""
        decode, prefill = self.outputs
        for arrays in (_needed(decode, self.plan.decode), _needed(prefill, self.plan.prefill)):
            for array in arrays.values():
                array.copy_to_host_async()

    def read(self, *, check_tags: bool) -> None:
        """Waits for the results.

        Raises:
            StateError: `check_tags` is set and a row has read the state of another row.
        """
        decode, prefill = self.outputs
        self.decode = read_results(decode, self.plan.decode, check_tags=check_tags)
        self.prefill = read_results(prefill, self.plan.prefill, check_tags=check_tags)
        self.outputs.clear()
        self.decode.take_proposals()
        self.prefill.take_proposals()

    def settle(self, scheduler: Scheduler) -> None:
        """Gives the scheduler the tokens that were read."""
        self.not_finite = [*self.decode.not_finite(), *self.prefill.not_finite()]
        for request in self.not_finite:
            scheduler.discard(request.request_id)
        result = StepResult(self.decode.emitted(), self.prefill.emitted(), self.decode.drafted)
        self.emitted = scheduler.settle(self.plan, result)

    def place(self, row: Row) -> tuple[HostOutput, int]:
        """Returns the results that contain a row, and the row's index in them."""
        lines = self.decode if isinstance(row, DecodeRow) else self.prefill
        return lines, next(i for i, other in enumerate(lines.rows) if other is row)

    def add_prompt_logprobs(self) -> None:
        """Adds the log-probabilities of prompt tokens to the outputs of the requests that asked for them."""
        if self.prefill.prompt is None:
            return
        token, top_ids, top, of_ids = self.prefill.prompt
        end_of_row = 0
        for row in self.plan.prefill:
            begin, end_of_row = end_of_row, end_of_row + row.num_tokens
            output = row.request.user.parent.output
            # Position 0 has no preceding token. Tokens after the prompt are output that is computed again after
            # preemption.
            first, end = max(row.length, 1), min(row.length + row.num_tokens, len(output.prompt_token_ids))
            if row.request.prompt_logprobs and isinstance(output.prompt_logprobs, PromptScores) and first < end:
                at = slice(begin + first - row.length, begin + end - row.length)
                output.prompt_logprobs.fill(first, token[at], top_ids[at], top[at], of_ids[at])


def read_results(output: StepOutput | None, rows: Sequence[Row], *, check_tags: bool) -> HostOutput:
    """Waits for a program's results. Returns those that `rows`, the program's first rows, need; none without a program.

    Raises:
        StateError: `check_tags` is set and a row has read the state of another row.
    """
    if output is None:
        return HostOutput(rows)
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in _needed(output, rows).items()}
    drafted = arrays.pop("num_drafts", np.zeros(0, np.int32))[: len(rows)].tolist()
    lines = HostOutput(rows, **arrays, drafted=drafted)
    prompt: PromptLogprobs | None = output.prompt_logprobs
    scored = [row.request.sampling for row in rows if row.request.prompt_logprobs]
    if prompt is not None and scored:
        token, top_ids, top = (np.asarray(x) for x in (prompt.token, prompt.top_ids, prompt.top))
        given = any(params.prompt_logprob_token_ids for params in scored)
        lines.prompt = token, top_ids, top, np.asarray(prompt.of_ids) if given else np.zeros((len(token), 0))
    if check_tags and bool(output.tag_error):
        raise StateError("a row has read a state slot that does not hold the state after its own tokens")
    return lines


def _needed(output: StepOutput | None, rows: Sequence[Row]) -> dict[str, jax.Array]:
    if output is None:
        return {}
    names = ["tokens", "finite", "num_drafts"]
    if any(row.request.sampling.logprobs is not None for row in rows):
        names += ["logprobs", "top_ids", "top_logprobs"]
    if any(row.request.lockstep for row in rows):
        names.append("proposed")
    if any(row.request.sampling.return_sampling_mask for row in rows):
        names.append("sampling_mask")
    arrays = {name: getattr(output, name) for name in names}
    return {name: array for name, array in arrays.items() if array is not None}
