"""`mamba-jax bench`: the programs of `benchmarks/`, each with options of its own (`mamba-jax bench NAME --help`)."""

from __future__ import annotations

import importlib

import typer

app = typer.Typer(
    name="bench", help="Measure speed. Prints JSON lines that name machine, versions and command.", no_args_is_help=True
)

PROGRAMS = {
    "throughput": ("benchmarks.throughput", "Tokens per second, offline: many prompts at once."),
    "latency": ("benchmarks.latency", "Time to first token and between tokens: a running server under Poisson load."),
    "decode": ("benchmarks.decode_prefill", "Decode and prefill by batch size, host time per step; beside a peer."),
    "prefix": ("benchmarks.prefix_cache", "What prefix caching gains where prompts share a beginning, and its cost."),
    "reuse": ("benchmarks.prefix_reuse", "How much of multi-turn traffic is reused, by slots. Counts only, no model."),
    "drafts": ("benchmarks.drafts", "What drafts cost: steps that verify and make them, beside plain ones."),
    "kernels": ("benchmarks.kernels", "Each operation by each of its implementations, at sizes of real models."),
}
"""Command -> module with a `main(arguments)`, and what it says of itself."""


def _add(name: str, module: str, text: str) -> None:
    # The program parses its own options, help included: they are defined in one place only.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name=name, help=text, context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        try:
            main = importlib.import_module(module).main
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            raise typer.BadParameter(f"{module} is not installed: run this from a clone of the project") from None
        try:
            code = main(context.args)
        except SystemExit as exit:  # argparse has said what was wrong, or the help
            if isinstance(exit.code, str):
                raise typer.BadParameter(exit.code) from None
            code = exit.code
        raise typer.Exit(code or 0)


for _name, (_module, _text) in PROGRAMS.items():
    _add(_name, _module, _text)
