"""Compiling at start-up, with a progress bar: everything, or only what no step can do without."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoints.placing import LINE_EVERY
from serving.engine.kept_programs import keep_programs
from serving.engine.loop import StepLoop

log = logging.getLogger(__name__)


def warm_up(loop: StepLoop, vocab_size: int, *, progress: bool, keep: bool = False, background: bool = False) -> None:
    """Compile every program that a later step can need: afterwards `loop.programs.compilations` stays as it is.

    Args:
        loop: whose programs.
        vocab_size: the model's.
        progress: show a bar on stderr. Without one, a line of the log now and then says how far it is.
        keep: take from disk what an earlier start has compiled, and put there what it has not.
        background: return with the widest program of each kind, which every step can run by; the narrower ones are
            compiled in a thread meanwhile.
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
                log.info("compiling: %d of %d programs after %.0f s", done, len(now), last - begin)

        loop.warm_up(now, advance)

    def report(what: str) -> None:
        loaded = 0 if kept is None else kept.loaded
        count, seconds = loop.programs.compilations, time.perf_counter() - begin
        log.info("%d %s after %.1f s: %d compiled, %d loaded from disk", count, what, seconds, count - loaded, loaded)

    report("programs ready")
    later = batches[len(now) :]
    if later:
        log.info("%d narrower programs are being compiled; until they are ready, steps run by wider ones", len(later))
        loop.batches.use_only(now)
        loop.warm_up_later(later, lambda: report("programs, all there are, ready"))
