"""What the device needs to know of requests beside their tokens: sampling parameters and grammars' masks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mamba_jax.batch import SeatBatch
from mamba_jax.rows import Rows
from mamba_jax.sampling.masks import MaskBatch
from serving.core import DecodeRow, Request, StepPlan
from serving.engine.batching import BatchBuilder
from serving.engine.user_request import Member


class RowInputs:
    """Builds the arrays of seats and masks from what requests ask for.

    Args:
        batches: for the arrays' shapes.
        vocab_size: of the model.
        masks: whether requests may have grammars.
    """

    def __init__(self, batches: BatchBuilder, *, vocab_size: int, masks: bool) -> None:
        self._batches, self._vocab_size, self._masks = batches, vocab_size, masks

    def seat(self, request: Request) -> SeatBatch:
        """The sampling parameters of a request that takes a seat."""
        member: Member = request.user
        metrics = member.parent.output.metrics
        if metrics is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
        return self._batches.seat(
            request.progress.row_id,
            request.sampling,
            seed=member.seed,
            choice=member.choice.output.index,
            prompt=member.parent.output.prompt_token_ids,
            output=request.output_token_ids,
            stop_ids=sorted(request.stop_token_ids),
            vocab_size=self._vocab_size,
        )

    def masks(self, plan: StepPlan, rows: Rows | None) -> Sequence[MaskBatch]:
        """Which tokens the rows with a grammar may choose, given the seats as the last step has left them.

        Such rows run in lockstep, so all their tokens are known by now.
        """
        if not self._masks:
            return ()
        held = [row for row in plan.rows if row.request.user.constraint is not None and row.sample]
        if not held:
            return ()
        made = np.asarray(rows.drafts) if rows is not None and any(row.num_drafts for row in held) else None
        masks: dict[int, np.ndarray] = {}
        for row in held:
            drafts: Sequence[int] = ()
            if not row.num_drafts:
                pass
            elif isinstance(row, DecodeRow) and not row.continues:
                drafts = row.tokens[row.certain :]
            elif made is not None:
                drafts = made[row.row_id].tolist()[: row.num_drafts]
            masks[row.row_id] = row.request.user.constraint.masks(drafts, self._batches.heads)
        return list(self._batches.masks(masks, self._vocab_size))
