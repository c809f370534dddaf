"""The command `check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint or published model size; on a CPU the demo model, elsewhere nemotron-h-8b."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time of the whole check.", min=1)] = 540.0,
    *,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, interpreted kernels.")] = False,
    json: Annotated[Path | None, typer.Option(help="File for all figures, to send with a report.")] = None,
) -> None:
    """Compare this machine's kernels with plain JAX, and time kernels, whole steps and the engine."""
    from serving.check.run import run_check

    raise typer.Exit(run_check(model, seconds=seconds, tiny=tiny, path=json))
