"""The progress bar of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def training_bar(steps: int, console: Console) -> Iterator[Callable[[dict[str, float]], None]]:
    """A bar over the steps; gives a function that is to be called with each record of the log."""
    columns = (
        TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("steps", total=steps, numbers="")

        def show(record: dict[str, float]) -> None:
            numbers = [f"loss {record['loss' if 'loss' in record else 'draft_loss_1']:.3f}"]
            if "draft_agreement_1" in record:
                numbers.append(f"drafts right {record['draft_agreement_1']:.0%}")
            numbers.append(f"{record['tokens'] / max(record['seconds'], 1e-9):,.0f} tokens/s")
            bar.update(task, completed=int(record["step"]), numbers=", ".join(numbers))

        yield show
