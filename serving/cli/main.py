"""The program `mamba-jax`. User errors are one line on stderr and exit code 2; tracebacks are bugs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer
from rich.console import Console

from checkpoints.errors import CheckpointError
from serving.api.http.settings import ServerSettings
from serving.cli.bench import app as bench
from serving.cli.commands import convert, generate, inspect
from serving.cli.engine_options import with_engine_options
from serving.cli.eval import evaluate
from serving.cli.plan import plan
from serving.cli.router import router
from serving.cli.serve import PANEL, serve
from serving.cli.settings_options import with_options
from serving.cli.terminal_chat import chat
from serving.cli.train import train
from serving.cli.train_grpo import train_grpo
from serving.cli.train_mtp import train_mtp
from serving.cli.vllm.command import translate
from serving.config import ConfigError
from serving.engine.request_error import RequestError
from serving.hosts.settings import HostSettings
from serving.split.settings import SplitSettings

app = typer.Typer(
    name="mamba-jax",
    help="Hybrid Mamba2/attention language models on GPU, TPU and CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(with_engine_options(generate))
_served = with_options(
    serve, ServerSettings, "settings", panel=PANEL, without=("default_sampling", "default_chat_template_kwargs")
)
_served = with_options(_served, SplitSettings, "split")
app.command()(with_engine_options(with_options(_served, HostSettings, "hosts", panel="Several hosts")))
app.command(name="router")(router)
app.command()(with_engine_options(chat))
app.command()(convert)
app.command()(inspect)
app.command()(with_engine_options(plan))
app.add_typer(bench)
app.command()(train)
app.command()(train_mtp)
app.command()(train_grpo)
app.command("eval")(evaluate)


@app.callback()
def _program() -> None:
    # With a callback, typer keeps command names even if there is only one command.
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit. Exit codes: 0 done, 1 some of it failed, 2 bad input, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the program on these arguments; returns the exit code."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    logger = logging.getLogger("serving")
    logger.handlers, logger.propagate = [logging.StreamHandler(sys.stderr)], False
    logger.setLevel(logging.INFO)
    arguments = list(arguments)
    try:
        if arguments[:1] == ["serve"]:
            arguments = ["serve", *in_own_words(arguments[1:])]
        code = typer.main.get_command(app).main(arguments, prog_name="mamba-jax", standalone_mode=False)
    except (CheckpointError, ConfigError, RequestError) as error:
        return _report(console, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`). Keep Python from failing again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _report(console, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _report(console, error.format_message())  # an error of the command line itself
    return code if isinstance(code, int) else 0


def in_own_words(words: Sequence[str]) -> Sequence[str]:
    """A command line of `serve` with vLLM's flags replaced by ours; says which of them have no effect.

    Raises:
        ConfigError: one of them asks for what is not there.
    """
    program = typer.main.get_command(app)
    command = program.get_command(typer.Context(program), "serve")  # type: ignore[attr-defined]
    own = {name for option in command.params for name in option.opts}
    translated = translate(words, own)
    for notice in translated.notices:
        logging.getLogger("serving.cli").info(notice)
    return translated.words


def _report(console: Console, message: str) -> int:
    console.print(f"mamba-jax: error: {' '.join(message.split())}", style="red", markup=False)
    return 2


if __name__ == "__main__":
    main()
