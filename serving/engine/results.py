"""What a step gave: results of its programs on the host, and the tokens they are for their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from mamba_jax.batch import PromptLogprobs, StepOutput
from serving.core import DecodeRow, Emitted, PrefillRow, Request, StepPlan
from serving.engine.output import TokenLogprobs, token_logprobs


class StateError(RuntimeError):
    """`debug_state` found a row reading a slot that does not hold what it should: a bug, never the user's fault."""


@dataclass
class HostOutput:
    """One program's results as host arrays. Log-probabilities are fetched only where a row wants them."""

    tokens: np.ndarray
    """[rows, H]; -1 = none."""
    finite: np.ndarray
    """[rows]: whether the logits were numbers."""
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    drafted: list[int] = field(default_factory=list)
    """Drafts that each row had verified; empty where there cannot be any."""
    proposed: np.ndarray | None = None
    """[rows, K]: drafts for each row's next step, -1 = none; fetched only where the host must know one's."""
    prompt: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """Of each packed prompt token: log-probability, ids of the likeliest, their log-probabilities."""

    def tables(self, row: int, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Log-probabilities of a row's tokens, each beside those of the `count` likeliest."""
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
        """The tokens of the first `count` rows."""
        return [[token for token in row if token >= 0] for row in self.tokens[:count].tolist()]


@dataclass
class Settled:
    """What one step gave: tokens by request, and beside them what the log-probabilities need."""

    emitted: list[Emitted]
    plan: StepPlan
    decode: HostOutput | None
    prefill: HostOutput | None
    not_finite: list[Request]
    """Ended, with nothing of them published: their logits were NaN or infinite."""
    prompt_starts: list[int] = field(default_factory=list)
    """For each prefill row, where its tokens begin in the packed stream."""

    def place(self, row: DecodeRow | PrefillRow) -> tuple[HostOutput, int]:
        """Results that a row is part of, and its index there."""
        rows: Sequence[DecodeRow | PrefillRow] = self.plan.decode if isinstance(row, DecodeRow) else self.plan.prefill
        lines = self.decode if isinstance(row, DecodeRow) else self.prefill
        assert lines is not None
        return lines, next(i for i, other in enumerate(rows) if other is row)


def start_reading(output: StepOutput | None, rows: Sequence[DecodeRow | PrefillRow]) -> None:
    """Begin to copy what `read_results` will want of these rows, without waiting for it."""
    if output is None:
        return
    output.tokens.copy_to_host_async()
    output.finite.copy_to_host_async()
    if output.num_drafts is not None:
        output.num_drafts.copy_to_host_async()
    if any(row.request.sampling.logprobs is not None for row in rows):
        for array in (output.logprobs, output.top_ids, output.top_logprobs):
            array.copy_to_host_async()
    proposed = _wanted_proposals(output, rows)
    if proposed is not None:
        proposed.copy_to_host_async()


def read_results(
    output: StepOutput | None, rows: Sequence[DecodeRow | PrefillRow], *, check_tags: bool
) -> HostOutput | None:
    """Wait for a program's results, and give what these rows, its first ones, want of them.

    Raises:
        StateError: `check_tags`, and a row has read another's state.
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
    prompt: PromptLogprobs | None = output.prompt_logprobs
    if prompt is not None and any(row.request.prompt_logprobs for row in rows):
        lines.prompt = (np.asarray(prompt.token), np.asarray(prompt.top_ids), np.asarray(prompt.top))
    if check_tags and bool(output.tag_error):
        raise StateError("a row has read a state slot that does not hold the state after its own tokens")
    return lines


def _wanted_proposals(output: StepOutput, rows: Sequence[DecodeRow | PrefillRow]) -> jax.Array | None:
    """What rows will verify next, where the host must know it of one of these."""
    return output.proposed if any(row.request.lockstep for row in rows) else None


def not_finite(lines: HostOutput | None, rows: Sequence[DecodeRow | PrefillRow]) -> list[Request]:
    """The requests, not ended yet, of which nothing can come any more: their logits were NaN or infinite."""
    if lines is None or lines.finite[: len(rows)].all():
        return []
    broken = [row.request for row, finite in zip(rows, lines.finite, strict=False) if not finite]
    return [request for request in broken if not request.finished]
