"""Compiles programs at start-up with a progress bar: all programs, or only those that suffice for every step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoints.placing import LINE_EVERY
from serving.engine.programs.kept_programs import keep_programs
from serving.engine.steps.batching import AnyBatch, name_of
from serving.engine.steps.loop import StepLoop

log = logging.getLogger(__name__)


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

    Args:
        loop: the loop with the programs to compile.
        vocab_size: the model's vocabulary size.
        progress: show a bar on stderr. Otherwise progress is logged at intervals.
        keep: load programs that an earlier start stored on disk, and store the others.
        background: return when the largest program of each kind is ready, which suffices for every step; a thread
            compiles the smaller ones.
        label: the beginning of log lines, to distinguish several engines.
    """
    begin = time.perf_counter()
    kept = keep_programs(loop.programs) if keep else None
    batches = list(loop.batches.warm_up_batches(vocab_size))
    now = batches[: loop.batches.num_essential] if background else batches
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("compiling", total=len(now))
        last, done = begin, 0

        def advance() -> None:
            nonlocal last, done
            done += 1
            bar.advance(task)
            if not progress and time.perf_counter() - last > LINE_EVERY:
                last = time.perf_counter()
                log.info("%scompiling: %d of %d programs after %.0f s", label, done, len(now), last - begin)

        loop.warm_up(now, advance)

    def report(what: str) -> None:
        loaded = 0 if kept is None else kept.loaded
        count, seconds = loop.programs.compilations, time.perf_counter() - begin
        text = "%s%d %s after %.1f s: %d compiled, %d loaded from disk"
        log.info(text, label, count, what, seconds, count - loaded, loaded)

    report("programs ready")
    later = batches[len(now) :]
    if later:
        names = ", ".join(map(name_of, later))
        text = "%scompiling %d smaller batch shapes in the background: %s"
        log.info(text, label, len(later), names)
        loop.batches.use_only(now)
        compile_later(loop, later, lambda: report("programs (all) ready"))


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
                loop.programs.program(store, rows, batch)
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
