"""Time limits: each job of a run gets a share, and the run ends in time even where a measurement hangs.

Each measurement is printed when it is made, so what was measured before a limit is never lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from serving.bench.report import emit

T = TypeVar("T")


class Deadline:
    """The end of a run, and of its current job.

    Args:
        seconds: of the whole run.
        shares: jobs in their order, each with its share of the time. A job also gets what earlier ones have left over.
        clock: seconds since any moment.
    """

    def __init__(
        self, seconds: float, shares: Mapping[str, float], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._end = clock, clock() + seconds
        self._waiting = dict(shares)
        self._job_end = self._end

    @property
    def unfinished(self) -> list[str]:
        """The current job and those that have not started."""
        return list(self._waiting)

    @property
    def is_over(self) -> bool:
        """Whether the time of the whole run is up."""
        return self._clock() >= self._end

    @contextmanager
    def job(self, name: str) -> Iterator[None]:
        """Limits what is measured inside to the job's share of the time that is left."""
        now = self._clock()
        left = max(0.0, self._end - now)
        self._job_end = now + left * self._waiting[name] / sum(self._waiting.values())
        try:
            yield
        finally:
            del self._waiting[name]

    def each(self, metric: str, cases: Iterable[T]) -> Iterator[T]:
        """Yields cases until the job's time is up, the first one in any case; reports those that are left out."""
        left_out, started = [], False
        for case in cases:
            if started and self._clock() >= self._job_end:
                left_out.append(case)
            else:
                started = True
                yield case
        if left_out:
            emit(metric=metric, skipped="the time of this job is up", cases=[str(case) for case in left_out])

    @contextmanager
    def enforced(self, grace: float, end: Callable[[int], None] = os._exit) -> Iterator[None]:
        """Ends the process `grace` seconds after the end of the run, because a compilation cannot be interrupted."""

        def stop() -> None:
            emit(metric="deadline", error="the time of the run is up", unfinished=self.unfinished)
            end(1)

        timer = threading.Timer(max(0.0, self._end - self._clock()) + grace, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
