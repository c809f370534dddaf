"""The inputs of requests other than their tokens: sampling parameters and grammars' masks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mamba_jax.batch import SeatBatch
from mamba_jax.sampling.masks import MaskBatch
from serving.core import DecodeRow, PrefillRow, Request, StepPlan
from serving.engine.batching import BatchBuilder
from serving.engine.mask_workers import MaskWorkers
from serving.engine.results import HostOutput
from serving.engine.user_request import Member


class RowInputs:
    """Builds the arrays of seats and masks from what requests ask for.

    Args:
        batches: for the arrays' shapes.
        vocab_size: of the model.
        masks: whether requests may have grammars.
    """

    def __init__(self, batches: BatchBuilder, *, vocab_size: int, masks: bool) -> None:
        self._batches, self._vocab_size = batches, vocab_size
        self.mask_workers = MaskWorkers(batches.heads) if masks else None
        """None: requests cannot have grammars."""

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

    def take_proposals(self, rows: Sequence[DecodeRow | PrefillRow], lines: HostOutput | None) -> None:
        """A program's results have been read: which drafts it has left in the seats of rows with a grammar.

        They stay there, and are what the row's next step verifies, however many steps it sits out.
        """
        if lines is None or lines.proposed is None:
            return
        for row, proposed in zip(rows, lines.proposed.tolist(), strict=False):
            if row.request.lockstep:
                row.request.user.proposed = proposed

    def masks(self, plan: StepPlan) -> Sequence[MaskBatch]:
        """Which tokens the rows with a grammar may choose, at each place that the step verifies.

        Such rows run in lockstep: their last step has settled, and their masks have been computed along all drafts that
        it left. Nothing is read from the device, which may be busy with a step that they sit out.
        """
        if self.mask_workers is None:
            return ()
        masks: dict[int, np.ndarray] = {}
        for row in plan.rows:
            member: Member = row.request.user
            if member.followed is not None and row.sample:
                assert member.followed.masks is not None, "a row whose mask is not ready has been planned"
                masks[row.row_id] = member.followed.masks
        return list(self._batches.masks(masks, self._vocab_size))

    def collect_masks(self, *, idle: bool = False) -> bool:
        """Take in masks that are ready: see `MaskWorkers.collect`."""
        return self.mask_workers is not None and self.mask_workers.collect(idle=idle)
