"""Compiles many programs at once: each is traced with the interpreter's lock, and compiled without it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

TRACED = 4
"""Programs that are traced at once: more would only wait for each other, and finish together at the end."""


class Compiler:
    """Threads that compile, in the order of `submit`. Also `mamba_jax.programs.StoredPrograms`, which keeps none."""

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or max(2, (os.cpu_count() or 1) - 2))
        self._tracing = threading.Semaphore(TRACED)
        self._jobs: list[Future[Any]] = []

    def submit(self, compile: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Runs `compile(*arguments)` in a thread. It should compile by `compiled`."""
        self._jobs.append(self._pool.submit(compile, *arguments))
        return self._jobs[-1]

    def compiled(
        self, lower: Callable[[], jax.stages.Lowered], options: Mapping[str, Any] | None = None
    ) -> jax.stages.Compiled:
        """Traces, not more than `TRACED` at once, and compiles."""
        with self._tracing:
            lowered = lower()
        return lowered.compile(None if options is None else dict(options))

    def find(self, arguments: Any, lower: Callable[[], jax.stages.Lowered], options: Any, kernels: Any) -> Any:
        """See `StoredPrograms`."""
        return self.compiled(lower, options)

    @property
    def busy(self) -> bool:
        """Whether a program is being compiled, so that nothing can be timed."""
        return any(not job.done() for job in self._jobs)

    def wait(self, seconds: float) -> tuple[int, int, float]:
        """Waits for all; returns how many are done, how many there are, and the seconds that it took.

        After so many seconds it cancels those that have not begun: while a program is compiled, nothing can be timed.
        """
        begin = time.perf_counter()
        done, late = wait(self._jobs, timeout=seconds)
        count, self._jobs = len(self._jobs), [job for job in late if not job.cancel()]
        return len(done), count, time.perf_counter() - begin

    def close(self) -> bool:
        """Starts no further compilation; returns whether none runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return all(job.done() for job in self._jobs)
