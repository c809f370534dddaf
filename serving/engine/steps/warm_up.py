"""The warm-up: compiles the programs of an engine before its first step, the most needed ones first."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoints.placing import LINE_EVERY
from mamba_jax.batch import PrefillBatch
from mamba_jax.rows import Rows
from mamba_jax.store import Store
from serving.engine.compiled_programs import keep_programs
from serving.engine.steps.batching import AnyBatch, name_of
from serving.engine.steps.loop import StepLoop

log = logging.getLogger(__name__)

_LOGGED_SECONDS = 1.0
"""The log has a line for each program that takes longer to compile."""


class WarmUpStopped(RuntimeError):
    """The warm-up ended before all programs were compiled, because `StepLoop.leaving` was set."""


def warm_up(
    loop: StepLoop,
    vocab_size: int,
    *,
    progress: bool,
    keep: bool = False,
    background: bool = False,
    label: str = "",
) -> None:
    """Compiles every program that a step can need. Afterwards `loop.programs.compilations` does not change.

    If the device has no memory for a program, steps use a wider one; if it has none for the widest prefill step, steps
    take half as many prompt tokens.

    Args:
        loop: the loop with the programs to compile.
        vocab_size: the model's vocabulary size.
        progress: show a bar on stderr. Otherwise progress is logged at intervals.
        keep: load programs that an earlier start stored on disk, and store the others.
        background: return when the largest program of each kind is ready, which suffices for every step; a thread
            compiles the smaller ones.
        label: the beginning of log lines, to distinguish several engines.

    Raises:
        WarmUpStopped: `loop.leaving` was set.
        Exception: a program that every step needs cannot be compiled.
    """
    begin = time.perf_counter()
    kept = keep_programs(loop.programs) if keep else None
    batches = list(loop.batches.warm_up_batches(vocab_size))
    essential = loop.batches.num_essential
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        total = essential if background else len(batches)
        task = bar.add_task("compiling", total=total)
        last, done = begin, 0

        def advance() -> None:
            nonlocal last, done
            done += 1
            bar.advance(task)
            if not progress and time.perf_counter() - last > LINE_EVERY:
                last = time.perf_counter()
                log.info("%scompiling: %d of %d programs after %.0f s", label, done, total, last - begin)

        while missing := compile_batches(loop, batches[:essential], advance):
            batch, error = next((each for each in missing if isinstance(each[0], PrefillBatch)), missing[0])
            if not (isinstance(batch, PrefillBatch) and (tokens := loop.batches.halve_prefill())):
                raise error
            loop.scheduler.fairness.limit(tokens)
            log.warning("%sno memory for the program %s: steps take %d prompt tokens", label, name_of(batch), tokens)
            batches = list(loop.batches.warm_up_batches(vocab_size))
        now, later = batches[:essential], batches[essential:]
        if not background:
            missing = compile_batches(loop, later, advance)
            for batch, _ in missing:
                log.warning("%sno memory for the program %s: steps use a wider one", label, name_of(batch))
            now = [batch for batch in batches if all(batch is not each for each, _ in missing)]
            later = []
            if missing:
                loop.batches.use_only(now)

    def report(what: str) -> None:
        loaded = 0 if kept is None else kept.loaded
        count, seconds = loop.programs.compilations, time.perf_counter() - begin
        text = "%s%d %s after %.1f s: %d compiled, %d loaded from disk"
        log.info(text, label, count, what, seconds, count - loaded, loaded)

    report("programs ready")
    if later:
        names = ", ".join(map(name_of, later))
        text = "%scompiling %d smaller batch shapes in the background: %s"
        log.info(text, label, len(later), names)
        loop.batches.use_only(now)
        compile_later(loop, later, lambda: report("programs (all) ready"))


def compile_batches(
    loop: StepLoop, batches: Sequence[AnyBatch], progress: Callable[[], None]
) -> list[tuple[AnyBatch, Exception]]:
    """Compiles the programs for batches of these shapes, and calls `progress` after each. Returns those for which the
    device has no memory, each with its error."""
    store, rows = loop.shapes
    missing: list[tuple[AnyBatch, Exception]] = []
    # Tracing needs the interpreter lock, but XLA compiles without it, so several programs compile in parallel.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        jobs = {pool.submit(_compile, loop, store, rows, batch): batch for batch in batches}
        try:
            for job in as_completed(jobs):
                error = job.exception()
                if isinstance(error, Exception) and "RESOURCE_EXHAUSTED" in str(error):
                    missing.append((jobs[job], error))
                elif error is not None:
                    raise error
                if loop.leaving.is_set():
                    raise WarmUpStopped("asked to stop while compiling")
                progress()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return missing


def _compile(loop: StepLoop, store: Store, rows: Rows, batch: AnyBatch) -> None:
    begin = time.perf_counter()
    program = loop.programs.program(store, rows, batch)
    seconds = time.perf_counter() - begin
    if seconds > _LOGGED_SECONDS and (found := program.memory_analysis()) is not None:
        code, temporary = (n / 2**20 for n in (found.generated_code_size_in_bytes, found.temp_size_in_bytes))
        log.info("%s: %.1f s, %.1f MiB of code, %.1f MiB of temporary memory", name_of(batch), seconds, code, temporary)


def compile_later(loop: StepLoop, batches: Sequence[AnyBatch], done: Callable[[], None]) -> threading.Thread:
    """Compiles programs in a thread while steps run. Steps use each program as soon as it is ready.

    A step uses the smallest program that is ready. It neither waits for a program nor compiles one.

    Args:
        loop: the loop with the programs to compile.
        batches: the shapes; no step depends on them.
        done: called from the thread when all programs are ready.
    """
    store, rows = loop.shapes

    def compile_all() -> None:
        last, missing = time.perf_counter(), 0
        for place, batch in enumerate(batches):
            if loop.leaving.is_set():
                return
            if time.perf_counter() - last > LINE_EVERY:
                last = time.perf_counter()
                log.info("compiling %d smaller batch shapes in the background", len(batches) - place)
            try:
                _compile(loop, store, rows, batch)
            except Exception:
                log.exception("a program cannot be compiled (%s): steps use a larger one", name_of(batch))
                missing += 1
                continue
            loop.batches.use_also(batch)
        if not missing:
            done()

    # Not a daemon thread, because the compiler must not run when the interpreter exits. `leaving` ends the thread after
    # the current program.
    thread = threading.Thread(target=compile_all, name="compiling")
    thread.start()
    return thread
