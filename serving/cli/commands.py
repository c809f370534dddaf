"""The commands `generate`, `convert` and `inspect`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.options import Options, with_options
from serving.config import ConfigError, EngineConfig
from serving.engine.sampling_params import SamplingParams

_SAMPLING = "Sampling"


@with_options(Options("flags", EngineConfig, "Engine"), config_file=True)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; '-' reads it from stdin.")] = None,
    *,
    input: Annotated[
        Path | None,
        typer.Option(help="JSON-lines file of prompts: id, prompt or prompt_token_ids, and sampling parameters."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON-lines file for the answers; an interrupted run resumes.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of output tokens.", rich_help_panel=_SAMPLING)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=_SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the likeliest tokens of this total probability.", rich_help_panel=_SAMPLING),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from this many likeliest tokens.", rich_help_panel=_SAMPLING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens less likely than this times the likeliest.", rich_help_panel=_SAMPLING),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: make tokens seen before less likely.", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; repeatable.", rich_help_panel=_SAMPLING)
    ] = None,
    sampling_seed: Annotated[
        int | None, typer.Option(help="Seed for sampling this prompt.", rich_help_panel=_SAMPLING)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.", rich_help_panel=_SAMPLING)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log what the engine does and what its store holds.")
    ] = False,
    flags: dict[str, Any],
) -> None:
    """Continue one PROMPT, streaming to the terminal, or a file of prompts (--input, --output)."""
    if not verbose:
        logging.getLogger("serving").setLevel(logging.WARNING)
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "seed": sampling_seed,
        "ignore_eos": ignore_eos or None,
    }
    given = {name: value for name, value in sampling.items() if value is not None}
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
        _generate_file(input, output, given, flags)
    else:
        assert prompt is not None
        _generate_one(sys.stdin.read() if prompt == "-" else prompt, chat, given, flags)


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face or Orbax directory.")],
    target: Annotated[Path, typer.Argument(help="Directory to create.")],
    form: Annotated[
        str,
        typer.Option(help="orbax, or hugging-face (quantized weights in the form of compressed-tensors)."),
    ] = "orbax",
    dtype: Annotated[str, typer.Option(help="Data type of the stored weights; auto keeps the checkpoint's.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="Quantize the weights: int8, fp8, int4 or nvfp4.")] = None,
    quantization_exclude: Annotated[
        list[str] | None, typer.Option(help="Module to leave wide, by name with wildcards; repeatable.")
    ] = None,
) -> None:
    """Convert a Hugging Face checkpoint to a sharded Orbax checkpoint, or to one with quantized weights."""
    import checkpoints

    exclude = quantization_exclude or ()
    checkpoints.convert(
        source,
        target,
        form=form,  # type: ignore[arg-type]
        dtype=dtype,
        quantization=quantization,
        quantization_exclude=exclude,
    )
    typer.echo(f"{source} -> {target}", err=True)


def inspect(
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, 'demo', the name of a published model size, or a hub's name.")
    ] = "demo",
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 32,
    *,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model from a hub.")] = None,
    hf_overrides: Annotated[str | None, typer.Option(help="JSON object of fields that replace config.json's.")] = None,
) -> None:
    """Show a model's structure and the memory that its state takes, without loading weights."""
    import jax.numpy as jnp
    from rich.console import Console
    from rich.table import Table

    from checkpoints import load_config
    from checkpoints.hub import local
    from checkpoints.load import quantised_as
    from mamba_jax import HybridModel
    from mamba_jax.store import StoreShape

    model = local(model, revision=revision, weights=False)
    config = load_config(model, hf_overrides=hf_overrides)
    shape = StoreShape.of(config)
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows: dict[str, Any] = {
        "family": config.family,
        "parameters": f"{HybridModel.abstract(config).num_parameters:,}",
        "quantized weights": quantised_as(model, hf_overrides=hf_overrides) or "none",
        "layers": config.pattern,
        "hidden size, vocabulary": f"{config.hidden_size:,}, {config.vocab_size:,}",
        "longest sequence": f"{config.max_position_embeddings:,}" if config.max_position_embeddings else "no limit",
        "draft layer": config.mtp_pattern or "none",
    }
    for dtype in ("float32", "bfloat16"):
        slot, page = shape.bytes_per_slot(jnp.dtype(dtype)), shape.bytes_per_page(page_size, jnp.dtype(dtype))
        rows[f"state of a sequence, {dtype}"] = f"{slot:,} bytes (recurrent states in float32)"
        rows[f"page of {page_size} tokens, {dtype}"] = f"{page:,} bytes" if page else "none: no attention"
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console(soft_wrap=True, highlight=False).print(table)


def _check_files(source: Path, target: Path) -> None:
    """Refuse unusable paths before spending minutes on loading a model."""
    if not source.is_file():
        raise ConfigError(f"--input {source}: no such file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: no such directory: {target.parent}")
    if target.is_dir() or (target.exists() and source.samefile(target)):
        raise ConfigError(f"--output {target}: must be a file other than the input")


def _generate_file(source: Path, target: Path, given: dict[str, Any], flags: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from serving.cli.batch_file import count_lines, run_batch
    from serving.engine.llm import LLM

    EngineConfig.create(**flags)
    SamplingParams.of(given)  # report a bad value on the command line once, not for every line
    console = Console(stderr=True, soft_wrap=True)
    llm = LLM(**flags)
    columns = (
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("requests", total=count_lines(source), failed="")

        def show(counts: Any) -> None:
            failed = f"{counts.failed} failed" if counts.failed else ""
            bar.update(task, completed=counts.done + counts.skipped, failed=failed)

        counts = run_batch(llm, source, target, defaults=given, progress=show)
    summary = f"{counts.done} answered, {counts.skipped} already in the output"
    console.print(summary + (f", {counts.failed} of them with an error" if counts.failed else ""), highlight=False)


def _generate_one(prompt: str, chat: bool, given: dict[str, Any], flags: dict[str, Any]) -> None:
    from serving.engine.fetch import fetched, tokenizer_of
    from serving.engine.llm import LLM

    # Nothing comes after it: a store for one sequence, and none for reuse.
    flags.setdefault("max_num_seqs", 1)
    if "mamba_cache_mode" not in flags and "disk_cache" not in flags:
        flags.setdefault("enable_prefix_caching", False)
    config = fetched(EngineConfig.create(**flags))
    params = SamplingParams.of({"max_tokens": 128, "temperature": 0.0} | given)
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
