"""`mamba-jax generate`: continue a prompt, or a file of prompts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from serving.cli.generation.batch_output import naming, read_answers
from serving.cli.options import Options, with_options
from serving.config import ConfigError, EngineConfig
from serving.engine.requests.sampling_params import SamplingParams
from serving.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from serving.cli.generation.batch_file import BatchCounts


class SamplingOptions(Settings):
    """Sampling parameters of the command line; unset ones have the defaults of `SamplingParams`."""

    COMMON = (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "sampling_seed",
        "ignore_eos",
    )  # fmt: skip

    max_tokens: int | None = Field(None, description="Maximum number of output tokens.")
    temperature: float | None = Field(None, description="Sampling temperature; 0 is greedy.")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens of this total probability.")
    top_k: int | None = Field(None, description="Sample from this many likeliest tokens.")
    min_p: float | None = Field(None, description="Drop tokens less likely than this times the likeliest.")
    repetition_penalty: float | None = Field(None, description="Above 1: make tokens seen before less likely.")
    stop: tuple[str, ...] = Field((), description="Text that ends the output; repeatable.")
    sampling_seed: int | None = Field(None, description="Seed for sampling this prompt.")
    ignore_eos: bool = Field(False, description="Continue past the end-of-sequence token.")


@with_options(
    Options("sampling", SamplingOptions, "Sampling"), Options("flags", EngineConfig, "Engine"), config_file=True
)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; '-' reads it from stdin.")] = None,
    *,
    input: Annotated[
        Path | None,
        typer.Option(help="JSON-lines file: id, prompt (or prompt_token_ids, messages), and sampling parameters."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON-lines file for the answers; an interrupted run resumes.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --output: answer every line again, and drop earlier answers.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --output: answer again the lines that failed.")
    ] = False,
    ignore_failed: Annotated[
        bool, typer.Option("--ignore-failed", help="With --output: exit with 0 even if lines failed.")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log what the engine does and what its store holds.")
    ] = False,
    sampling: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    """Continue one PROMPT, streaming to the terminal, or a file of prompts (--input, --output)."""
    if not verbose:
        logging.getLogger("serving").setLevel(logging.WARNING)
    if "sampling_seed" in sampling:
        sampling["seed"] = sampling.pop("sampling_seed")
    if (prompt is None) == (input is None):
        raise ConfigError("give either a PROMPT or --input FILE")
    if (input is None) != (output is None):
        raise ConfigError("--input and --output must be given together")
    # One run of this command rarely needs every program, so compile them when first needed.
    flags.setdefault("warmup", False)
    if input is not None and output is not None:
        if chat:
            raise ConfigError("--chat is for a single PROMPT")
        _check_files(input, output)
        again = {"overwrite": overwrite, "retry_failed": retry_failed}
        if _generate_file(input, output, sampling, flags, again) and not ignore_failed:
            raise typer.Exit(1)
    elif overwrite or retry_failed or ignore_failed:
        raise ConfigError("--overwrite, --retry-failed and --ignore-failed are for --output")
    else:
        assert prompt is not None
        _generate_one(sys.stdin.read() if prompt == "-" else prompt, chat, sampling, flags)


def _check_files(source: Path, target: Path) -> None:
    """Refuses unusable paths before loading a model, which can take minutes."""
    if not source.is_file():
        raise ConfigError(f"--input {source}: no such file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: no such directory: {target.parent}")
    if target.exists() and (not target.is_file() or source.samefile(target)):
        raise ConfigError(f"--output {target}: must be a file other than the input")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"--output {target}: cannot be written")
    with naming(target):
        read_answers(target)


def _generate_file(
    source: Path, target: Path, sampling: dict[str, Any], flags: dict[str, Any], again: dict[str, bool]
) -> int:
    """Returns the number of lines that failed. `again`: which lines to answer again."""
    from rich.console import Console

    from serving.cli.generation.batch_file import run_batch
    from serving.engine.llm import LLM

    EngineConfig.create(**flags)
    SamplingParams(**sampling)  # report a bad value on the command line once, not for every line
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    llm = LLM(**flags)
    with source.open("rb") as file:
        total = sum(1 for line in file if line.strip())
    with _reporter(console, total) as show:
        counts = run_batch(llm, source, target, defaults=sampling, progress=show, **again)
    speed = counts.tokens / max(counts.seconds, 1e-9)
    summary = f"{counts.done} answered, {counts.skipped} already in the output"
    summary += f"; {counts.tokens:,} tokens in {counts.seconds:.1f} s, {speed:,.0f} tokens/s"
    if counts.failed:
        summary += f"; {counts.failed} lines failed (--retry-failed answers them again)"
    console.print(summary)
    return counts.failed


@contextlib.contextmanager
def _reporter(console: Console, total: int) -> Iterator[Callable[[BatchCounts], None]]:
    """Yields a function that shows a bar, or without a terminal a line at least every 10 s."""
    from rich import progress

    from checkpoints.placing import LINE_EVERY
    from serving.cli.generation.batch_file import BatchCounts

    latest, begin, ended = BatchCounts(), time.monotonic(), threading.Event()
    columns = (
        progress.TextColumn("requests"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), progress.TextColumn("{task.fields[note]}"),
    )  # fmt: skip

    def note() -> str:
        if not latest.done:
            return "programs are compiled before the first answers"
        speed = f"{latest.tokens / max(latest.seconds, 1e-9):,.0f} tokens/s"
        return f"{speed}, {latest.failed} failed" if latest.failed else speed

    def print_lines() -> None:
        while not ended.wait(LINE_EVERY):
            done = latest.done + latest.skipped
            console.print(f"{done:,} of {total:,} requests after {time.monotonic() - begin:.0f} s; {note()}")

    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total, note=note())

        def show(counts: BatchCounts) -> None:
            nonlocal latest
            latest = counts
            bar.update(task, completed=counts.done + counts.skipped, note=note())

        printing = threading.Thread(target=print_lines, name="progress", daemon=True)
        if not console.is_terminal:
            printing.start()
        try:
            yield show
        finally:
            ended.set()


def _generate_one(prompt: str, chat: bool, sampling: dict[str, Any], flags: dict[str, Any]) -> None:
    from serving.engine.assembly.fetch import fetched, tokenizer_of
    from serving.engine.llm import LLM

    # No request follows: allocate a store for one sequence, without prefix caching.
    flags.setdefault("max_num_seqs", 1)
    if "mamba_cache_mode" not in flags and "disk_cache" not in flags:
        flags.setdefault("enable_prefix_caching", False)
    config = fetched(EngineConfig.create(**flags))
    params = SamplingParams(**{"max_tokens": 128, "temperature": 0.0} | sampling)
    tokenizer_of(config)
    llm = LLM(**flags)
    if chat:
        stream = llm.stream({"prompt_token_ids": llm.encode_chat([{"role": "user", "content": prompt}])}, params)
    else:
        stream = llm.stream(prompt, params)
        sys.stdout.write(prompt)
    shown = 0
    for output in stream:
        text = output.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
    sys.stdout.flush()
