"""`mamba-jax eval`: bits per byte, accuracy and acceptance of drafts, or agreement with another model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serving.cli.options import check_replaceable
from serving.config import ConfigError


def evaluate(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or 'demo'.")] = "demo",
    data: Annotated[
        Path | None, typer.Option(help="Directory with heldout_*.jsonl. Unset: the model's directory.")
    ] = None,
    problems: Annotated[int | None, typer.Option(help="Number of maths problems. Unset: all.", min=1)] = None,
    prompts: Annotated[int, typer.Option(help="Number of text prompts to measure draft acceptance on.", min=0)] = 40,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of sequences that run at once.", min=1)] = 16,
    quantization: Annotated[
        str | None, typer.Option(help="Quantize the model's weights first: int8, fp8, int4 or nvfp4.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Only compare predictions on a text with those of this model, the original.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="With --against: a text file. Unset: that of --data.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write all figures to.")] = None,
) -> None:
    """Evaluate a model trained with `train` on held-out text and problems. Downloads nothing."""
    from checkpoints.load import load_config, load_model
    from checkpoints.resolve import resolve
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.corpus import SAMPLE_PROBLEMS, SAMPLE_TEXT, problem_prompt, read_documents
    from serving.cli import measures
    from serving.engine.llm import LLM
    from serving.engine.requests.sampling_params import SamplingParams

    console = Console(soft_wrap=True, highlight=False)
    check_replaceable("--output", output, "eval", _is_report)
    directory = data or resolve(model).files
    if against is not None:
        _compare(model, quantization, against, text or directory / SAMPLE_TEXT, output, console)
        return
    if text is not None:
        raise ConfigError("--text has no effect without --against")
    for name in (SAMPLE_PROBLEMS, SAMPLE_TEXT):
        if not (directory / name).is_file():
            raise ConfigError(f"no {name} in {directory}; give a directory with held-out text and problems as --data")
    texts = list(read_documents(directory / SAMPLE_TEXT))
    tasks = list(read_documents(directory / SAMPLE_PROBLEMS, needs=("question", "answer", "result")))[:problems]
    if not (texts and tasks):
        raise ConfigError(f"{directory / (SAMPLE_PROBLEMS if texts else SAMPLE_TEXT)}: no documents; --data needs some")
    tokenizer = require_tokenizer(model)
    loaded = load_model(model, dtype="float32", quantization=quantization, progress=False)
    figures: dict[str, Any] = {"model": model, "bits_per_byte": {}}

    sources = [str(document.get("id", "text")).partition(":")[0] for document in texts]
    groups = {name: [texts[i] for i, source in enumerate(sources) if source == name] for name in sorted({*sources})}
    groups["maths"] = tasks
    for name, documents in groups.items():
        figures["bits_per_byte"][name] = measures.bits_per_byte(loaded, tokenizer, documents)
        console.print(f"bits per byte, {name}: {figures['bits_per_byte'][name]:.4f}")

    flags: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": 2048, "warmup": False}
    flags |= {"state_block_size": 128, "quantization": quantization}
    params = SamplingParams(max_tokens=256, temperature=0.0)
    with LLM(model, **flags) as llm:
        answers = llm.generate([problem_prompt(task) for task in tasks], params)
    right = [i for i, task in enumerate(tasks) if measures.is_correct(task, answers[i].outputs[0].text)]
    figures["accuracy"] = {"correct": len(right), "problems": len(tasks), "right": right}
    console.print(f"problems answered exactly: {len(right)} of {len(tasks)} ({len(right) / len(tasks):.1%})")

    if prompts and load_config(model).mtp_pattern and loaded.mtp is not None:
        figures["acceptance"] = {}
        with LLM(model, **flags, **measures.MTP_DRAFTS) as llm:
            texts_params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
            continued = llm.generate(measures.text_prompts(tokenizer, texts, prompts), texts_params)
            answers = llm.generate([problem_prompt(task) for task in tasks[:prompts]], params)
        for name, outputs in (("text", continued), ("maths", answers)):
            stats = measures.total_stats(outputs)
            length, rates = stats.mean_acceptance_length, stats.acceptance_at
            figures["acceptance"][name] = {"mean_accepted_length": length, "rates": rates}
            positions = ", ".join(f"{rate:.3f}" for rate in rates)
            console.print(f"MTP, K=3, {name}: mean accepted length {length:.2f}; by position {positions}")
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")


def _is_report(fields: dict[str, Any]) -> bool:
    return fields.keys() >= {"model", "bits_per_byte"} or fields.keys() >= {"kl", "largest_kl", "agreement"}


def _compare(
    model: str, quantization: str | None, against: str, text: Path, output: Path | None, console: Console
) -> None:
    """Compares the model's predictions with those of `against`, both in float32."""
    from checkpoints.load import load_model
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.corpus import read_documents, text_of
    from serving.cli import measures

    if not text.is_file():
        raise ConfigError(f"{text}: no such file; give a text file as --text")
    tokenizer = require_tokenizer(against)
    try:
        documents = (
            [text_of(document) for document in read_documents(text)]
            if text.suffix == ".jsonl"
            else [text.read_text(encoding="utf-8")]
        )
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text}: is not UTF-8 text ({error})") from None
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tokens = [token for each in documents for token in (*bos, *tokenizer.encode(each, add_special_tokens=False))]
    own = load_model(model, dtype="float32", quantization=quantization, progress=False)
    try:
        result = measures.compare(own, load_model(against, dtype="float32", progress=False), tokens)
    except ValueError as error:
        raise ConfigError(f"{model} against {against}: {error}") from None
    console.print(f"{result.tokens:,} tokens of {text.name}", markup=False)
    console.print(f"KL divergence: {result.kl:.5f} nats per token, {result.largest_kl:.3f} at most")
    console.print(f"the same likeliest token: {result.agreement:.2%}")
    console.print(f"nats per token: {result.nats:.4f}, and {result.reference_nats:.4f} by {against}", markup=False)
    if output is not None:
        output.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
