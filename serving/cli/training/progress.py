"""What all training commands do: check paths, show progress, and remove a run's temporary state."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serving.config import ConfigError


def training_console(output: Path | None, data: Path | None = None) -> Console:
    """Returns the console for messages.

    Raises:
        ConfigError: `output` has content, or `data` does not exist.
    """
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: already exists and is not an empty directory")
    if data is not None and not data.exists():
        raise ConfigError(f"--data {data}: no such file or directory")
    return Console(stderr=True, soft_wrap=True, highlight=False)


def weights_of(model: Any) -> dict[str, Any]:
    """Returns a model's weights by dotted path.

    Raises:
        ModelConfigError: they are quantized.
    """
    from mamba_jax.model import parameters
    from mamba_jax.train.loop import refuse_quantized

    values = {path: leaf.get_value() for path, leaf in parameters(model).items()}
    refuse_quantized(values)
    return values


@contextmanager
def run_folder(run: Path | None) -> Iterator[Path]:
    """Returns the folder of a run that can be resumed, or else one that is removed at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        yield run or Path(temporary)


def finished(run: Path | None, settings: Any, config: Any, batches: Any, console: Console, **options: Any) -> Any:
    """Trains, and returns the result of a whole run. An interrupted one is aborted, and says how to resume.

    Args:
        run: the folder; None: the run cannot be resumed.
        settings, config, batches, options: as for `mamba_jax.train.loop.train`.
    """
    from mamba_jax.train.loop import train

    steps = settings.steps
    settings = dataclasses.replace(settings, save_every=min(steps, 100) if run else steps)
    with run_folder(run) as directory, training_bar(steps, console) as show:
        done = train(settings, config, batches, directory, progress=show, **options)
    if not done.finished:
        console.print(
            f"interrupted after {done.steps} steps" + ("; run the same command again to resume" if run else "")
        )
        raise typer.Abort
    return done


@contextmanager
def training_bar(steps: int, console: Console) -> Iterator[Callable[[dict[str, float]], None]]:
    """Shows a progress bar over the steps. Yields a function to call with each record of the log.

    Exits with code 1 if the loss is not finite.
    """
    from mamba_jax.train.loop import TrainingDiverged

    columns = (
        TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )  # fmt: skip
    bar = Progress(*columns, console=console)
    task = bar.add_task("steps", total=steps, numbers="")

    def show(record: dict[str, float]) -> None:
        numbers = [f"loss {record['loss' if 'loss' in record else 'draft_loss_1']:.3f}"]
        if "validation_loss" in record:
            numbers.append(f"validation loss {record['validation_loss']:.3f}")
        if "draft_agreement_1" in record:
            numbers.append(f"drafts right {record['draft_agreement_1']:.0%}")
        numbers.append(f"{record['tokens'] / max(record['seconds'], 1e-9):,.0f} tokens/s")
        bar.update(task, completed=int(record["step"]), numbers=", ".join(numbers))

    try:
        with bar:
            yield show
    except TrainingDiverged as error:
        console.print(f"mamba-jax: error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
