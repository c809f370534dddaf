"""Errors and the progress bar of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serving.config import ConfigError


@contextmanager
def training_errors(console: Console) -> Iterator[None]:
    """Converts invalid settings to `ConfigError`, and exits with code 1 if the loss is not finite."""
    from mamba_jax.config import ModelConfigError
    from mamba_jax.train.loop import TrainingDiverged

    try:
        yield
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    except TrainingDiverged as error:
        console.print(f"mamba-jax: error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


@contextmanager
def training_bar(steps: int, console: Console) -> Iterator[Callable[[dict[str, float]], None]]:
    """Shows a progress bar over the steps. Yields a function to call with each record of the log."""
    columns = (
        TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("steps", total=steps, numbers="")

        def show(record: dict[str, float]) -> None:
            numbers = [f"loss {record['loss' if 'loss' in record else 'draft_loss_1']:.3f}"]
            if "validation_loss" in record:
                numbers.append(f"validation loss {record['validation_loss']:.3f}")
            if "draft_agreement_1" in record:
                numbers.append(f"drafts right {record['draft_agreement_1']:.0%}")
            numbers.append(f"{record['tokens'] / max(record['seconds'], 1e-9):,.0f} tokens/s")
            bar.update(task, completed=int(record["step"]), numbers=", ".join(numbers))

        yield show
