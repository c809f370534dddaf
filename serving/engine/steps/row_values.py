"""What a step takes from requests besides their tokens, and its results on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mamba_jax.batch import PromptLogprobs, SeatBatch, StepOutput
from mamba_jax.sampling.masks import MaskBatch
from serving.core.planning.plan import DecodeRow, PrefillRow, RowResult, StepPlan
from serving.core.requests.request import Request
from serving.engine.requests.output import PromptScores, TokenLogprobs, token_logprobs
from serving.engine.requests.request import Choice
from serving.engine.steps.batching import BatchBuilder
from serving.engine.structured.mask_workers import MaskWorkers
from serving.state_transfer.source import Inbox


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


def start_reading(output: StepOutput | None, rows: Sequence[DecodeRow | PrefillRow]) -> None:
    """Starts to copy the arrays that `read_results` needs for these rows, without waiting."""
    for array in _needed(output, rows).values() if output is not None else ():
        array.copy_to_host_async()


def read_results(
    output: StepOutput | None, rows: Sequence[DecodeRow | PrefillRow], *, check_tags: bool
) -> HostOutput | None:
    """Waits for a program's results. Returns those that `rows`, the program's first rows, need.

    Raises:
        StateError: `check_tags` is set and a row has read the state of another row.
    """
    if output is None:
        return None
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in _needed(output, rows).items()}
    drafted = arrays.pop("num_drafts", np.zeros(0, np.int32))[: len(rows)].tolist()
    lines = HostOutput(**arrays, drafted=drafted)
    prompt: PromptLogprobs | None = output.prompt_logprobs
    scored = [row.request.sampling for row in rows if row.request.prompt_logprobs]
    if prompt is not None and scored:
        token, top_ids, top = (np.asarray(x) for x in (prompt.token, prompt.top_ids, prompt.top))
        given = any(params.prompt_logprob_token_ids for params in scored)
        lines.prompt = token, top_ids, top, np.asarray(prompt.of_ids) if given else np.zeros((len(token), 0))
    if check_tags and bool(output.tag_error):
        raise StateError("a row has read a state slot that does not hold the state after its own tokens")
    return lines


def _needed(output: StepOutput, rows: Sequence[DecodeRow | PrefillRow]) -> dict[str, jax.Array]:
    names = ["tokens", "finite", "num_drafts"]
    if any(row.request.sampling.logprobs is not None for row in rows):
        names += ["logprobs", "top_ids", "top_logprobs"]
    if any(row.request.lockstep for row in rows):
        names.append("proposed")
    if any(row.request.sampling.return_sampling_mask for row in rows):
        names.append("sampling_mask")
    arrays = {name: getattr(output, name) for name in names}
    return {name: array for name, array in arrays.items() if array is not None}


def not_finite(lines: HostOutput | None, rows: Sequence[DecodeRow | PrefillRow]) -> list[Request]:
    """Returns the unfinished requests with NaN or infinite logits, which cannot continue."""
    if lines is None or lines.finite[: len(rows)].all():
        return []
    broken = [row.request for row, finite in zip(rows, lines.finite, strict=False) if not finite]
    return [request for request in broken if not request.finished]


class RowInputs:
    """Builds the arrays of seats and masks from the parameters of requests.

    Args:
        batches: the builder of batches, which determines the arrays' shapes.
        vocab_size: the model's vocabulary size.
        masks: whether requests may have grammars.
    """

    def __init__(self, batches: BatchBuilder, *, vocab_size: int, masks: bool) -> None:
        self._batches, self._vocab_size, self._masks = batches, vocab_size, masks
        self.inbox = Inbox()
        """What other threads post to the engine's thread."""
        self.mask_workers = MaskWorkers(batches.heads, self.inbox)

    def seat(self, request: Request) -> SeatBatch:
        """Returns the sampling parameters of a request that takes a seat."""
        choice: Choice = request.user
        metrics = choice.parent.output.metrics
        if metrics is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
        adapter = choice.parent.adapter
        return self._batches.seat(
            request.progress.row_id,
            request.sampling,
            seed=choice.seed,
            choice=choice.index,
            prompt=choice.parent.output.prompt_token_ids,
            output=request.output_token_ids,
            stop_ids=sorted(request.stop_token_ids),
            vocab_size=self._vocab_size,
            adapter=0 if adapter is None else adapter.entry,
        )

    def take_proposals(self, rows: Sequence[DecodeRow | PrefillRow], lines: HostOutput | None) -> None:
        """Records the drafts that a program left in the seats of rows with a grammar, from the program's results.

        The drafts stay in the seats until the row's next step verifies them, even if the row skips steps before.
        """
        if lines is None or lines.proposed is None:
            return
        for row, proposed in zip(rows, lines.proposed.tolist(), strict=False):
            if row.request.lockstep:
                row.request.user.proposed = proposed

    def masks(self, plan: StepPlan) -> Sequence[MaskBatch]:
        """Returns the masks of tokens that rows with a grammar may choose, at each position that the step verifies.

        Such rows run in lockstep: their last step has settled, and masks for all its drafts are computed. This method
        reads nothing from the device, which may be busy with a step without these rows.
        """
        if not self._masks:
            return ()
        masks: dict[int, np.ndarray] = {}
        for row in plan.rows:
            choice: Choice = row.request.user
            if choice.followed is not None and row.sample:
                assert choice.followed.masks is not None, "a row whose mask is not ready has been planned"
                masks[row.row_id] = choice.followed.masks
        return list(self._batches.masks(masks, self._vocab_size))
