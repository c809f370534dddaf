"""`mamba-jax bits`: which schedules change the bits of a request's log-probabilities."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Annotated

import typer


def bits(
    model: Annotated[str, typer.Option(help="Checkpoint directory, 'demo', or a hub's name.")] = "demo",
    dtype: Annotated[
        str, typer.Option(help="Data type of weights and activations. auto: the engine's choice.")
    ] = "auto",
    schedule_invariant: Annotated[
        bool, typer.Option("--schedule-invariant", help="Run the engine with its flag schedule_invariant.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each schedule.")] = False,
) -> None:
    """Show how many log-probabilities of one greedy request keep their bits under other schedules.

    A prompt of 600 tokens is answered with 48 tokens: alone, from the cache, next to other requests, in chunks, with
    drafts, after a preemption, in two engines of a split, and restored from host memory and from disk. The command
    measures and never fails because bits differ.
    """
    from rich.console import Console
    from rich.table import Table

    from serving.cli.evaluation.schedules import compare_schedules

    logging.getLogger("serving").setLevel(logging.WARNING)
    table = Table(title=f"{model}, {dtype}: log-probabilities with the bits of the plain run")
    for heading in ("schedule", "equal", "largest difference", ""):
        table.add_column(heading, justify="right" if heading in ("equal", "largest difference") else "left")
    for line in compare_schedules(model, flags={"dtype": dtype, "schedule_invariant": schedule_invariant}):
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(line)))
        table.add_row(line.name, f"{line.equal} of {line.total}", f"{line.largest:.1e}", line.note)
    if not as_json:
        Console(soft_wrap=True, highlight=False).print(table)
