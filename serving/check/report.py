"""The figures of a check: printed when they are measured, for people, and kept in one JSON file."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar


class Report:
    """Figures in the order in which they are measured. `path` is written after each, so that a kill loses none."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.figures: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # a deadline reports from a thread of its own

    def add(self, metric: str, **fields: Any) -> None:
        """Prints one line, and keeps it."""
        with self._lock:
            self.figures.append({"metric": metric, **fields})
            print(f"{metric}: " + ", ".join(_told(name, value) for name, value in fields.items()), flush=True)
            text = "[\n" + ",\n".join(map(json.dumps, self.figures)) + "\n]\n"
            if self.path is not None and self.path.exists() and not self.path.is_file():
                self.path.write_text(text)  # a device or a pipe
            elif self.path is not None:
                path = self.path.resolve()
                with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as out:
                    out.write(text)
                os.chmod(out.name, 0o644)
                os.replace(out.name, path)


def _told(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} {value}"
    return f"{value:.4g} {name}" if isinstance(value, float) else f"{value} {name}"


T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A part of a check."""

    name: str
    share: float
    """Of the time, in proportion to those of later jobs. A job also gets what earlier ones have left over."""
    measure: Callable[[], None]


class Deadline:
    """The end of a check, and of its current job. `clock` gives seconds since any moment."""

    def __init__(self, seconds: float, report: Report, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end, self._report = clock, clock() + seconds, report
        self._job_end = self._end
        self.failed: list[str] = []
        """What went wrong, or was not started."""

    @property
    def left(self) -> float:
        """Seconds until the end of the current job, at least 0."""
        return max(0.0, self._job_end - self._clock())

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs jobs until the time is up. The failure of one leaves the others their time."""
        for place, job in enumerate(jobs):
            now = self._clock()
            if now >= self._end:
                self.fail(job.name, "not started: the time of the check is up")
                continue
            shares = sum(each.share for each in jobs[place:])
            self._job_end = now + (self._end - now) * job.share / shares
            try:
                job.measure()
            except Exception as error:  # the other measurements are still wanted
                self.fail(job.name, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")

    def each(self, metric: str, cases: Iterable[T], *, named: Callable[[T], str] = str) -> Iterator[T]:
        """Yields cases until the job's time is up, the first one in any case; reports those that are left out."""
        left_out, started = [], False
        for case in cases:
            if started and not self.left:
                left_out.append(named(case))
            else:
                started = True
                yield case
        if left_out:
            self._report.add(metric, skipped="the time of this job is up", cases=left_out)

    def fail(self, name: str, why: str) -> None:
        """Reports that a part failed, or was not started."""
        self.failed.append(name)
        self._report.add(name, error=why)

    @contextmanager
    def enforced(self, grace: float, end: Callable[[int], None] = os._exit) -> Iterator[None]:
        """Ends the process `grace` seconds after the end of the check, because a compilation cannot be interrupted."""

        def stop() -> None:
            self.fail("deadline", "the time of the check is up, in the middle of a measurement")
            end(1)

        timer = threading.Timer(max(0.0, self._end - self._clock()) + grace, stop)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
