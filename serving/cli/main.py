"""The program `mamba-jax`. User errors are one line on stderr and exit code 2; tracebacks are bugs.

Only the requested command is imported, and JAX only when that command runs.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from checkpoints.errors import CheckpointError
from serving.cli.jax_import import import_jax
from serving.cli.options import Command, printable
from serving.core.errors import RequestError
from serving.settings import ConfigError, did_you_mean

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """Where a command is defined, and its line in the list of commands."""

    module: str
    name: str
    panel: str
    summary: str
    jax: bool = True
    """Whether JAX is imported before it runs."""


COMMANDS = {
    "generate": Entry("generation.generate", "generate", "Run models", "Continue a prompt, or a file of prompts."),
    "chat": Entry("generation.generate", "chat", "Run models", "Chat with a model or a server.", jax=False),
    "serve": Entry("serve", "serve", "Run models", "Serve a model over HTTP with OpenAI's API."),
    "router": Entry("serve", "router", "Run models", "Route requests to prefill and decode workers.", jax=False),
    "inspect": Entry("models", "inspect", "Prepare models", "Show a model's structure and memory."),
    "plan": Entry("models", "plan", "Prepare models", "Size a model for another machine."),
    "convert": Entry("models", "convert", "Prepare models", "Convert or quantize a checkpoint."),
    "train": Entry("training.train", "train", "Train models", "Train a model on a corpus."),
    "train-mtp": Entry("training.train_additions", "train_mtp", "Train models", "Train a draft layer by distillation."),
    "train-lora": Entry("training.train_additions", "train_lora", "Train models", "Train a LoRA adapter."),
    "train-s0": Entry("training.train_additions", "train_s0", "Train models", "Train initial states of recurrences."),
    "train-grpo": Entry(
        "training.train_grpo", "train_grpo", "Train models", "Train a model by reinforcement learning."
    ),
    "eval": Entry("evaluate", "evaluate", "Measure", "Evaluate a model on held-out text and problems."),
    "check": Entry("bench", "check", "Measure", "Check and time the kernels of this machine."),
    "bench": Entry("bench", "app", "Measure", "Run a benchmark."),
}
PREFIX = "MAMBA_JAX"
"""Environment variables set options: MAMBA_JAX_MAX_NUM_SEQS=8 is --max-num-seqs 8. The command line has precedence."""
_OTHER_VARIABLES = {
    f"{PREFIX}_{name}"
    for name in ("API_KEY", "ADMIN_KEY", "SPLIT_SECRET", "CONFIG", "EXTRAS", "INSTRUCTIONS", "NATIVE", "NO_NATIVE")
}
"""Those that are read elsewhere: never options, or options with another rule, since keys may contain spaces."""
_SERVICE_LINK = re.compile(r".*(_SERVICE_(HOST|PORT\w*)|_PORT_\d+_\w+)=.*|.*_PORT=\w+://.*")
"""Variables that Kubernetes sets in each pod for a Service named mamba-jax: MAMBA_JAX_PORT=tcp://10.0.0.1:8000."""
ENGINE_COMMANDS = ("generate", "chat", "serve", "plan")
"""Commands with the engine's options, which also take `--config` and vLLM's flags."""


class _Program(TyperGroup):
    """Builds a command when it is first asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, entry in COMMANDS.items():
            panels.setdefault(entry.panel, []).append((name, entry.summary))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


@functools.cache
def command(name: str) -> Any:
    """Returns the command of this name."""
    entry = COMMANDS[name]
    program = getattr(importlib.import_module(f"serving.cli.{entry.module}"), entry.name)
    if not isinstance(program, typer.Typer):
        function = _after_jax(program) if entry.jax else program
        program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        program.command(name, cls=Command, context_settings={"auto_envvar_prefix": PREFIX})(function)
    built: Any = typer.main.get_command(program)
    for param in built.params:
        if _variable(param) in _OTHER_VARIABLES:
            param.allow_from_autoenv = False
    return built


def _variables(program: Any) -> set[str]:
    """The environment variables that set options of a command."""
    return {_variable(param) for param in program.params if param.param_type_name == "option"}


def _variable(param: Any) -> str:
    return f"{PREFIX}_{param.name.upper()}"


def _check_variables(name: str) -> None:
    """Logs a warning for each variable that sets no option of any command."""
    given = {each for each in os.environ if each.startswith(f"{PREFIX}_")} - _OTHER_VARIABLES
    for each in [each for each in given if _SERVICE_LINK.fullmatch(f"{each}={os.environ[each]}")]:
        given.remove(each)
        del os.environ[each]
    unread = given - _variables(command(name))
    options = {variable for each in COMMANDS if unread for variable in _variables(command(each))}
    for each in sorted(unread - options):
        log.warning("environment variable %s is not read%s", each, did_you_mean(each, options | _OTHER_VARIABLES))


def _after_jax(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> None:
        import_jax(options.get("memory_utilization"))
        function(*arguments, **options)

    return wrapped


app = typer.Typer(
    name="mamba-jax",
    cls=_Program,
    help="Hybrid recurrent/attention language models on GPU, TPU and CPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(value: bool) -> None:
    if value:
        try:
            version = metadata.version("mamba-jax")
        except metadata.PackageNotFoundError:  # a checkout that is not installed; this imports JAX
            from mamba_jax import __version__ as version
        typer.echo(f"mamba-jax {version}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    # With a callback, typer makes a group.
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit. Exit codes: 0 done, 1 some of it failed, 2 bad input, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the program on these arguments; returns the exit code."""
    logger = logging.getLogger("serving")
    logger.handlers, logger.propagate = [logging.StreamHandler(sys.stderr)], False
    logger.setLevel(logging.INFO)
    arguments = list(arguments) or ["--help"]
    try:
        if arguments[0] in COMMANDS:
            _check_variables(arguments[0])
        if arguments[0] in ENGINE_COMMANDS:
            arguments = [arguments[0], *translate_arguments(arguments[0], arguments[1:])]
        program: Any = typer.main.get_command(app)
        code = program.main(arguments, prog_name="mamba-jax", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Keep Python from failing again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _report(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        return _report(message)
    return code if isinstance(code, int) else 0


def translate_arguments(name: str, words: Sequence[str]) -> list[str]:
    """A command line with the file of `--config` and vLLM's flags replaced by options of the command.

    Options of the file come first, without those that the command line sets. Flags without effect are logged.

    Raises:
        ConfigError: a flag that is not supported, or a file that cannot be read.
    """
    from serving.settings import read_config_file
    from serving.vllm.flags import Translated, translate, words_of

    own = {option: param.name for param in command(name).params for option in (*param.opts, *param.secondary_opts)}
    path, words = _config_of(words)
    if _config_of(words)[0] is not None:
        raise ConfigError("--config is given more than once; put all options in one file")
    path = path or os.environ.get(f"{PREFIX}_CONFIG")
    translated = translate(words, own)
    units: list[Translated] = []
    if path is not None:
        on_command_line = _options_in(translated.words, own)
        for key, value in read_config_file(path).items():
            try:
                unit = translate(words_of(key, value), own)
            except (ValueError, TypeError) as error:  # also a table within itself
                raise ConfigError(f"config file {path}: {error}") from None
            options = _options_in(unit.words, own)
            if None in options:
                names = [option[2:].replace("-", "_") for option in own if option.startswith("--")]
                raise ConfigError(f"config file {path}: unknown option {key!r}{did_you_mean(key, names)}")
            if not options & on_command_line:
                units.append(unit)
    for each in (*units, translated):
        for notice in each.notices:
            logging.getLogger("serving.cli").info(notice)
    return [word for each in (*units, translated) for word in each.words]


def _config_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--config`, and the words without it."""
    left, path = list(words), None
    for i, word in enumerate(words):
        if word == "--":
            break
        if word == "--config" and i + 1 < len(words):
            path, left[i : i + 2] = words[i + 1], []
            break
        if word.startswith("--config="):
            path, left[i : i + 1] = word.partition("=")[2], []
            break
    return path, left


def _options_in(words: Sequence[str], own: dict[str, str]) -> set[str | None]:
    """Names of the parameters that words set; None for an unknown option."""
    return {own.get(word.partition("=")[0]) for word in words if word.startswith("--") and word != "--"}


def _message(error: Any) -> str | None:
    """The line for the user; None if the error is a bug."""
    from serving.vllm.flags import FLAGS

    # The module of ModelConfigError imports JAX.
    of_model = any(kind.__name__ == "ModelConfigError" for kind in type(error).__mro__)
    if of_model or isinstance(error, (CheckpointError, ConfigError, RequestError)):
        return str(error)
    if not hasattr(error, "format_message"):
        return None
    if hasattr(error, "possibilities"):
        known = {option for param in error.ctx.command.params for option in (*param.opts, *param.secondary_opts)}
        if error.ctx.info_name in ENGINE_COMMANDS:
            known |= {flag.name for flag in FLAGS}
        return f"No such option: {error.option_name}{did_you_mean(error.option_name, known)}"
    return str(error.format_message())


def _report(message: str) -> int:
    typer.secho(f"mamba-jax: error: {printable(' '.join(message.split()))}", fg="red", err=True)
    return 2
