"""`mamba-jax generate` continues a prompt, or a file of prompts; `mamba-jax chat` is a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from serving.cli.generation.batch_output import naming, read_answers
from serving.cli.jax_import import import_jax
from serving.cli.options import Options, printable, with_options
from serving.config import ConfigError, EngineConfig
from serving.core.errors import RequestError
from serving.engine.requests.sampling_params import SamplingParams
from serving.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from serving.cli.generation.batch_file import BatchCounts
    from serving.engine.requests.output import RequestOutput


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
        Path | None, typer.Option(help="JSON-lines file: id, prompt (or prompt_token_ids, messages), sampling.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON-lines file for the answers; runs can be resumed.")] = None,
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
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what the engine does.")] = False,
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

    SamplingParams(**sampling)  # report a bad value on the command line once, not for every line
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    llm = LLM(**flags)
    with source.open("rb") as file:
        total = sum(1 for line in file if line.strip())
    with _reporter(console, total) as show:
        counts = run_batch(llm, source, target, defaults=sampling, progress=show, **again)
    speed = counts.tokens / max(counts.seconds, 1e-9)
    summary = f"{counts.done} finished, {counts.skipped} already in the output"
    summary += f"; {counts.tokens:,} tokens in {counts.seconds:.1f} s, {speed:,.0f} tokens/s"
    if counts.failed:
        summary += f"; {counts.failed} of {total} lines failed (--retry-failed answers them again)"
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
    for piece, _ in _pieces(stream):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _pieces(stream: Iterable[RequestOutput]) -> Iterator[tuple[str, RequestOutput]]:
    """Yields the new text of each output."""
    shown = 0
    for output in stream:
        text = output.outputs[0].text
        yield text[shown:], output
        shown = len(text)


_HELP = "/reset starts over, /exit (or Ctrl-D) quits"


@dataclass
class AnswerStats:
    """Token counts of one answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        text = f"{self.prompt_tokens} prompt tokens, {self.cached_tokens} of them cached; {self.completion_tokens} new"
        if self.drafted:
            text += f"; {self.accepted} of {self.drafted} drafts accepted"
        return text


Messages = list[dict[str, str]]
Responder = Callable[[Messages, AnswerStats], Iterator[str]]
"""Yields pieces of the answer to a conversation, and fills in the stats."""


@with_options(Options("flags", EngineConfig, "Engine"), config_file=True)
def chat(
    *,
    url: Annotated[str | None, typer.Option(help="URL of a server to use, e.g. http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's API key.", envvar="MAMBA_JAX_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    flags: dict[str, Any],
) -> None:
    """Chat with a model in the terminal. Each answer reports what prefix caching and drafts saved."""
    sampling = {"max_tokens": max_tokens, **({} if temperature is None else {"temperature": temperature})}
    from rich.console import Console

    console = Console(highlight=False)
    answer = remote(url, api_key, sampling) if url is not None else local(flags, sampling)
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    console.print(_HELP, style="dim")
    converse(console, answer, beginning)


def converse(console: Console, answer: Responder, beginning: Messages, ask: Callable[[], str] | None = None) -> None:
    """Reads questions and prints answers until input ends. Reports failed requests. `ask` is for tests."""
    messages = list(beginning)
    while True:
        try:
            question = (ask or (lambda: console.input("[bold green]you[/] ")))().strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/reset":
            messages = list(beginning)
            console.print("a new conversation", style="dim")
        if not question or question.startswith("/"):
            if question not in ("", "/reset"):
                console.print(_HELP, style="dim")
            continue
        messages.append({"role": "user", "content": question})
        stats, pieces = AnswerStats(), []
        console.print("[bold cyan]model[/] ", end="")
        try:
            for piece in answer(messages, stats):
                pieces.append(piece)
                console.print(printable(piece), end="", markup=False, soft_wrap=True)
            console.print()
            console.print(str(stats), style="dim")
        except KeyboardInterrupt:
            console.print("\nstopped", style="dim")
        except (ConfigError, RequestError) as error:
            console.print(f"\nerror: {printable(str(error))}", style="red", markup=False, soft_wrap=True)
            messages.pop()  # the user can ask the question again
            continue
        messages.append({"role": "assistant", "content": "".join(pieces)})


def local(flags: dict[str, Any], sampling: dict[str, Any]) -> Responder:
    """Returns a function that answers with a model in this process."""
    import_jax(flags.get("memory_utilization"))
    from serving.engine.assembly.fetch import fetched, tokenizer_of
    from serving.engine.llm import LLM

    flags.setdefault("max_num_seqs", 1)
    flags.setdefault("warmup", False)
    config = fetched(EngineConfig.create(**flags))
    params = SamplingParams(**sampling)
    if not tokenizer_of(config).has_chat_template:
        raise ConfigError(f"{config.model} has no chat template; use `mamba-jax generate` for plain text")
    llm = LLM(**flags)

    def answer(messages: Messages, stats: AnswerStats) -> Iterator[str]:
        for piece, output in _pieces(llm.stream({"prompt_token_ids": llm.encode_chat(messages)}, params)):
            yield piece
            stats.prompt_tokens, stats.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
            stats.completion_tokens = len(output.outputs[0].token_ids)
            if output.metrics is not None:
                stats.drafted, stats.accepted = output.metrics.drafts.drafted, output.metrics.drafts.accepted

    return answer


def remote(url: str, api_key: str | None, sampling: dict[str, Any]) -> Responder:
    """Returns a function that answers through a server with OpenAI's API."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=None)

    def answer(messages: Messages, stats: AnswerStats) -> Iterator[str]:
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ConfigError(f"{url}: {_error(response.read())}")
                yield from _texts(response.iter_lines(), stats)
        except httpx.HTTPError as error:
            raise ConfigError(f"{url}: {error}") from None

    return answer


def _texts(lines: Iterator[str], stats: AnswerStats) -> Iterator[str]:
    """Yields the texts in a stream's events."""
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        try:
            event = json.loads(line[6:])
            if "error" in event:
                raise ConfigError(str(event["error"]["message"]))
            if usage := event.get("usage"):
                stats.prompt_tokens, stats.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                details = usage.get("completion_tokens_details") or {}
                stats.accepted = details.get("accepted_prediction_tokens", 0)
                stats.drafted = stats.accepted + details.get("rejected_prediction_tokens", 0)
            texts = [str(choice["delta"].get("content") or "") for choice in event["choices"]]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the server sent an invalid event: {line[:80]}") from None
        yield from filter(None, texts)


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the server sent an error that is not JSON"
