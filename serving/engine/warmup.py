"""Compiling at start-up, with a progress bar: everything, or only what no step can do without."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoints.placing import LINE_EVERY
from serving.engine.batching import AnyBatch, name_of
from serving.engine.kept_programs import keep_programs
from serving.engine.loop import StepLoop

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
    """Compile every program that a later step can need: afterwards `loop.programs.compilations` stays as it is.

    Args:
        loop: whose programs.
        vocab_size: the model's.
        progress: show a bar on stderr. Without one, a line of the log now and then says how far it is.
        keep: take from disk what an earlier start has compiled, and put there what it has not.
        background: return with the widest program of each kind, which every step can run by; the narrower ones are
            compiled in a thread meanwhile.
        label: what lines of the log begin with, where they would be taken for another engine's.
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
        text = "%s%d narrower programs are still coming; until then steps run by wider ones: %s"
        log.info(text, label, len(later), names)
        loop.batches.use_only(now)
        compile_later(loop, later, lambda: report("programs, all there are, ready"))


def compile_later(loop: StepLoop, batches: Sequence[AnyBatch], done: Callable[[], None]) -> threading.Thread:
    """Compile programs in a thread of their own while steps run; each is used from the step on after it is ready.

    Until then a step takes the narrowest program that there is: it never waits for one, nor compiles any.

    Args:
        loop: whose programs.
        batches: shapes without which every step can run.
        done: called from that thread once all are there.
    """
    store, rows = loop.shapes

    def compile_all() -> None:
        last, missing = time.perf_counter(), 0
        for place, batch in enumerate(batches):
            if loop.leaving.is_set():
                return
            if time.perf_counter() - last > LINE_EVERY:
                last = time.perf_counter()
                log.info("compiling: %d narrower programs are still coming", len(batches) - place)
            try:
                loop.programs.program(store, rows, batch)
            except Exception:
                log.exception("a program cannot be compiled (%s): steps go on by wider ones", name_of(batch))
                missing += 1
                continue
            loop.batches.use_also(batch)
        if not missing:
            done()

    # Not a daemon: the compiler must not be running when the interpreter ends. `leaving` ends it after one program.
    thread = threading.Thread(target=compile_all, name="compiling")
    thread.start()
    return thread
