"""The command `plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.options import Options, with_options
from serving.config import ConfigError, EngineConfig


@with_options(Options("flags", EngineConfig, "Engine"), config_file=True)
def plan(
    topology: Annotated[str, typer.Option(help="TPU slice such as v5e-8, or GPUs such as h100-4.")],
    *,
    full: Annotated[bool, typer.Option("--full", help="Compile every program, not only the two largest.")] = False,
    analysis: Annotated[bool, typer.Option("--analysis", help="Estimate by arithmetic, without compiling.")] = False,
    context: Annotated[int | None, typer.Option(help="Tokens of context to assume in decode steps.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write a diagram to this file.")] = None,
    flags: dict[str, Any],
) -> None:
    """Compile and size a model for another machine. Needs no weights and no accelerator."""
    import jax
    from rich.console import Console

    from serving.capacity.picture import as_svg
    from serving.capacity.plan import make_plan
    from serving.capacity.report import as_json as plain
    from serving.capacity.report import as_text
    from serving.capacity.targets import target
    from serving.engine.fetch import fetched

    machine = target(topology)
    if svg is not None and not svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg {svg}: no such directory: {svg.parent}")
    if flags.get("tensor_parallel_size") not in (None, machine.count):
        raise ConfigError(
            f"tensor_parallel_size {flags['tensor_parallel_size']}: {topology} has {machine.count} device(s), "
            "and a plan uses all of them"
        )
    if (replicas := flags.get("data_parallel_size") or 1) > 1:
        raise ConfigError(f"data_parallel_size {replicas}: a plan is of one replica; give its devices as --topology")
    # Do not touch this machine's accelerators: another process may be using them.
    jax.config.update("jax_platforms", "cpu")
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    config = EngineConfig.create(**(flags | {"tensor_parallel_size": machine.count}))
    config = fetched(config, weights=False)
    with errors.status("planning") as status:
        made = make_plan(
            config, machine, compile=not analysis, full=full, context=context, progress=lambda text: status.update(text)
        )
    if as_json:
        sys.stdout.write(json.dumps(plain(made), indent=1) + "\n")
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(as_text(made))
    if svg is not None:
        svg.write_text(as_svg(made))
    if not made.fits:
        raise typer.Exit(1)
