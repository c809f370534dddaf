"""`mamba-jax bench`: the programs of `serving.bench`, each with its own options; and `mamba-jax check`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from serving.cli.jax_import import import_jax
from serving.cli.options import check_replaceable

app = typer.Typer(
    name="bench",
    help="Run a benchmark. Prints JSON lines that include machine, versions and command.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


PROGRAMS = {
    "throughput": ("serving.bench.throughput", "Offline throughput: tokens per second for many prompts at once."),
    "latency": ("serving.bench.latency", "Time to first token and between tokens of a server under Poisson load."),
    "serve": ("serving.bench.latency", "The same as latency, under vLLM's name."),
}
"""Command -> module with a `main(arguments)`, and its help text."""


def _add(name: str, module: str, text: str) -> None:
    # The program parses its own options, including help, so that they are defined in one place.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name=name, help=text, context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        import_jax()
        try:
            code = importlib.import_module(module).main(context.args)
        except SystemExit as exit:  # argparse has printed the error or the help
            if isinstance(exit.code, str):
                raise typer.BadParameter(exit.code) from None
            code = exit.code
        raise typer.Exit(code or 0)


for _name, (_module, _text) in PROGRAMS.items():
    _add(_name, _module, _text)


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
    check_replaceable("--json", json, "check", lambda found: bool(found) and all(each["metric"] for each in found))
    from serving.check.run import run_check

    raise typer.Exit(run_check(model, seconds=seconds, tiny=tiny, path=json))
