"""Compiling everything at start-up, with a progress bar."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serving.engine.loop import StepLoop

log = logging.getLogger(__name__)


def warm_up(loop: StepLoop, vocab_size: int, *, progress: bool) -> None:
    """Compile every program that a later step can need: afterwards `loop.programs.compilations` stays as it is."""
    begin = time.perf_counter()
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("compiling", total=loop.batches.num_programs)
        loop.warm_up(vocab_size, lambda: bar.advance(task))
    log.info("%d programs compiled in %.1f s", loop.programs.compilations, time.perf_counter() - begin)
