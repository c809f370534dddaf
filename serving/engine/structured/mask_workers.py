"""Computes masks of structured outputs in separate threads, so that a slow grammar never delays the engine's thread.

Until its mask is ready, a request has no row in a step (`Request.blocked`); other requests continue. Before each step,
the engine waits briefly for the masks of choices that have been quick so far. One low-priority thread computes all
other masks, and each choice has a budget of processor time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from serving.core.requests.request import Request
from serving.engine.structured.grammars import Constraint
from serving.engine.structured.reasoning import ReasoningConstraint
from serving.state_transfer.source import Inbox

log = logging.getLogger(__name__)

_PATIENCE = 0.01
"""Maximum seconds that a step waits for the masks of all quick choices."""
_IDLE_PATIENCE = 0.01
"""Maximum seconds that an idle engine waits for a mask before it checks for new requests."""
_QUICK = 0.002
"""Processor time in seconds up to which a mask counts as quick."""
_MOST_PER_STEP = 1.0
"""Maximum processor time in seconds for the masks of one step of a choice."""
_ALLOWANCE, _PER_TOKEN = 2.0, 0.01
"""Maximum processor time in seconds for all masks of a choice: a constant, plus an amount for each token."""


@dataclass(slots=True, eq=False)
class FollowedChoice:
    """A choice's position in its grammar, and the masks of its next step."""

    constraint: Constraint | ReasoningConstraint
    masks: np.ndarray | None = None
    """The allowed tokens next and after each draft, uint32 [heads, words]. None while a worker computes them."""
    seconds: float = 0.0
    """Processor time in seconds spent on the grammar so far."""
    slow: bool = False
    """Whether steps do not wait for this choice's masks."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Calls `Constraint.advance` and adds its processor time to `seconds`."""
        begin = time.thread_time()
        count = self.constraint.advance(tokens)
        self.seconds += time.thread_time() - begin
        return count


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    choice: FollowedChoice
    drafts: Sequence[int]
    masks: np.ndarray | None = None
    seconds: float = 0.0
    failure: Exception | None = None


class MaskWorkers:
    """Computes the masks of one engine. All methods are for the engine's thread.

    Args:
        heads: number of masks per step of a choice, H: one more than its drafts.
        inbox: of the engine's loop.
    """

    def __init__(self, heads: int, inbox: Inbox) -> None:
        self._heads, self._inbox = heads, inbox
        self._quick_pool = ThreadPoolExecutor(2, thread_name_prefix="masks")
        self._slow_pool = ThreadPoolExecutor(1, thread_name_prefix="slow-masks", initializer=_lower_priority)
        self._new: list[_Job] = []
        self._awaited: set[_Job] = set()
        """Quick jobs in progress."""
        self._under_way = 0
        self._refused: list[tuple[Request, str, bool]] = []

    def submit(self, request: Request, choice: FollowedChoice, drafts: Sequence[int]) -> None:
        """Computes the masks of a choice's next step, which may verify `drafts`; the request is blocked until then."""
        request.blocked, choice.masks = True, None
        self._new.append(_Job(request, choice, tuple(drafts)))

    def collect(self, *, idle: bool = False) -> bool:
        """Collects the masks that are ready. Returns whether any job was finished.

        Waits for quick choices or, if the engine is `idle`, for the first mask of any choice.
        """
        self._start()
        if not self._under_way:
            return False
        end = time.monotonic() + (_IDLE_PATIENCE if idle else _PATIENCE)
        taken = False
        while self._under_way:
            left = end - time.monotonic() if (not taken if idle else self._awaited) else 0.0
            if not self._inbox.take(max(left, 0.0)):
                break
            taken = True
        for job in self._awaited:  # not ready in time: later steps do not wait for these
            job.choice.slow = True
        self._awaited.clear()
        return taken

    def pop_refused(self) -> list[tuple[Request, str, bool]]:
        """Returns requests that failed since the last call, with the reason and whether their grammar is the cause."""
        refused, self._refused = self._refused, []
        return refused

    def close(self) -> None:
        """Ends the threads after their current computation."""
        self._quick_pool.shutdown(wait=False, cancel_futures=True)
        self._slow_pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        new, self._new = [job for job in self._new if not job.request.finished], []
        self._under_way += len(new)
        quick = [job for job in new if not job.choice.slow]
        self._awaited.update(quick)
        if quick:  # one task for all: submitting a task takes as long as a quick mask
            self._quick_pool.submit(self._compute, quick)
        for job in new:
            if job.choice.slow:
                self._slow_pool.submit(self._compute, [job])

    def _take(self, job: _Job) -> None:
        self._under_way -= 1
        self._awaited.discard(job)
        request, choice = job.request, job.choice
        if request.finished:
            return
        choice.slow = job.seconds > _QUICK
        choice.seconds += job.seconds
        if job.failure is not None:
            log.error("the masks of request %s could not be computed", request.request_id, exc_info=job.failure)
            self._refused.append((request, f"structured outputs: internal error: {job.failure}", False))
            return
        most = _ALLOWANCE + _PER_TOKEN * len(request.output_token_ids)
        if job.seconds > _MOST_PER_STEP or choice.seconds > most:
            spent = f"{job.seconds:.1f} s for one token" if job.seconds > _MOST_PER_STEP else f"{choice.seconds:.1f} s"
            text = f"structured outputs: following the grammar takes too long ({spent}): simplify it"
            self._refused.append((request, text, True))
            return
        choice.masks, request.blocked = job.masks, False

    def _compute(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            begin = time.thread_time()
            try:
                if not job.request.finished:
                    job.masks = job.choice.constraint.masks(job.drafts, self._heads)
            except Exception as error:
                job.failure = error
            job.seconds = time.thread_time() - begin
            self._inbox.post(partial(self._take, job))


def _lower_priority() -> None:
    # Linux has priorities of threads; on other systems the thread keeps its priority.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
