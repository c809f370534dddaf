"""The program `mamba-jax`. Whatever the user got wrong is one line on stderr and exit code 2; tracebacks are bugs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer
from rich.console import Console

from checkpoints.errors import CheckpointError
from serving.api.bench import app as bench
from serving.api.commands import convert, generate, inspect
from serving.api.engine_options import with_engine_options
from serving.api.eval import evaluate
from serving.api.plan import plan
from serving.api.serve import serve
from serving.api.terminal_chat import chat
from serving.api.train import train
from serving.api.train_mtp import train_mtp
from serving.config import ConfigError
from serving.disagg.command import router
from serving.disagg.options import with_options
from serving.disagg.settings import SplitSettings
from serving.engine.sampling_params import RequestError

app = typer.Typer(
    name="mamba-jax",
    help="Hybrid Mamba2/attention language models on GPU, TPU and CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(with_engine_options(generate))
app.command()(with_engine_options(with_options(serve, SplitSettings, "split")))
app.command(name="router")(router)
app.command()(with_engine_options(chat))
app.command()(convert)
app.command()(inspect)
app.command()(with_engine_options(plan))
app.add_typer(bench)
app.command()(train)
app.command()(train_mtp)
app.command("eval")(evaluate)


@app.callback()
def _program() -> None:
    # With a callback typer keeps the names of the commands, also while there are few.
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
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="mamba-jax", standalone_mode=False)
    except (CheckpointError, ConfigError, RequestError) as error:
        return _complain(console, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(console, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _complain(console, error.format_message())  # the command line itself is wrong
    return code if isinstance(code, int) else 0


def _complain(console: Console, message: str) -> int:
    console.print(f"mamba-jax: error: {' '.join(message.split())}", style="red", markup=False)
    return 2


if __name__ == "__main__":
    main()
