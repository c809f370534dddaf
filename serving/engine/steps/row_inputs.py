"""Inputs of requests besides their tokens: sampling parameters and the masks of grammars."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mamba_jax.batch import SeatBatch
from mamba_jax.sampling.masks import MaskBatch
from serving.core import DecodeRow, PrefillRow, Request, StepPlan
from serving.engine.requests.request import Choice
from serving.engine.steps.batching import BatchBuilder
from serving.engine.steps.results import HostOutput
from serving.engine.structured.mask_workers import MaskWorkers
from serving.state_transfer.source import Inbox


class RowInputs:
    """Builds the arrays of seats and masks from the parameters of requests.

    Args:
        batches: the builder of batches, which determines the arrays' shapes.
        vocab_size: the model's vocabulary size.
        masks: whether requests may have grammars.
    """

    def __init__(self, batches: BatchBuilder, *, vocab_size: int, masks: bool) -> None:
        self._batches, self._vocab_size = batches, vocab_size
        self.inbox = Inbox()
        """What other threads post to the engine's thread."""
        self.mask_workers = MaskWorkers(batches.heads, self.inbox) if masks else None
        """Computes masks; None if requests cannot have grammars."""

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
        if self.mask_workers is None:
            return ()
        masks: dict[int, np.ndarray] = {}
        for row in plan.rows:
            choice: Choice = row.request.user
            if choice.followed is not None and row.sample:
                assert choice.followed.masks is not None, "a row whose mask is not ready has been planned"
                masks[row.row_id] = choice.followed.masks
        return list(self._batches.masks(masks, self._vocab_size))

    def collect_masks(self, *, idle: bool = False) -> bool:
        """Collects masks that are ready; see `MaskWorkers.collect`."""
        return self.mask_workers is not None and self.mask_workers.collect(idle=idle)
