"""Compiling everything at start-up, with a progress bar."""

from __future__ import annotations

import contextlib
import logging
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoints.placing import LINE_EVERY
from serving.engine.kept_programs import keep_programs
from serving.engine.loop import StepLoop

log = logging.getLogger(__name__)


def warm_up(loop: StepLoop, vocab_size: int, *, progress: bool, keep: bool = False) -> None:
    """Compile every program that a later step can need: afterwards `loop.programs.compilations` stays as it is.

    Args:
        loop: whose programs.
        vocab_size: the model's.
        progress: show a bar on stderr. Without one, a line of the log now and then says how far it is.
        keep: take from disk what an earlier start has compiled, and put there what it has not.
    """
    begin, loaded = time.perf_counter(), 0
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        keep_programs(loop.programs) if keep else contextlib.nullcontext() as kept,
        Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar,
    ):
        task = bar.add_task("compiling", total=loop.batches.num_programs)
        last, done = begin, 0

        def advance() -> None:
            nonlocal last, done
            done += 1
            bar.advance(task)
            if not progress and time.perf_counter() - last > LINE_EVERY:
                last = time.perf_counter()
                log.info("compiling: %d of %d programs after %.0f s", done, loop.batches.num_programs, last - begin)

        loop.warm_up(vocab_size, advance)
        if kept is not None:
            loaded = kept.loaded
    count, seconds = loop.programs.compilations, time.perf_counter() - begin
    log.info("%d programs ready after %.1f s: %d compiled, %d loaded from disk", count, seconds, count - loaded, loaded)
