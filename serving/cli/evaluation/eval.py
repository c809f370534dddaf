"""`mamba-jax eval`: bits per byte, accuracy, and a table of how the engine's features affect speed and answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serving.config import ConfigError

if TYPE_CHECKING:
    from serving.engine.requests.draft_stats import DraftStats


def evaluate(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or 'demo'.")] = "demo",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory with heldout_problems.jsonl and heldout_text.jsonl. Unset: the model's directory."
        ),
    ] = None,
    problems: Annotated[int | None, typer.Option(help="Number of maths problems. Unset: all.")] = None,
    shots: Annotated[int, typer.Option(help="Solved examples before each problem of the table.")] = 2,
    table: Annotated[bool, typer.Option(help="Run every cache mode with every draft source.")] = True,
    table_problems: Annotated[int, typer.Option(help="Number of problems for the table.")] = 50,
    prompts: Annotated[int, typer.Option(help="Number of text prompts to measure draft acceptance on.")] = 40,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of sequences that run at once.")] = 16,
    quantization: Annotated[
        str | None, typer.Option(help="Quantize the model's weights first: int8, fp8, int4 or nvfp4.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Only compare the model's predictions on a text with those of this model, the original."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="With --against: a text file. Unset: the held-out text of --data.")
    ] = None,
    consistency: Annotated[
        bool,
        typer.Option(
            "--consistency", help="Only compare the engine's log-probabilities with those of the training forward."
        ),
    ] = False,
    schedule_invariant: Annotated[
        bool,
        typer.Option("--schedule-invariant", help="With --consistency: engines and score of that mode."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write all figures to.")] = None,
) -> None:
    """Evaluate a model trained with `train` on held-out text and problems. Downloads nothing."""
    from checkpoints.load import load_config, load_model
    from checkpoints.resolve import resolve
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.corpus import SAMPLE_PROBLEMS, SAMPLE_TEXT
    from serving.cli.evaluation import measures

    console = Console(soft_wrap=True, highlight=False)
    directory = data or resolve(model).files
    if against is not None:
        _compare(model, quantization, against, text or directory / SAMPLE_TEXT, output, console)
        return
    if schedule_invariant and not consistency:
        raise ConfigError("--schedule-invariant has no effect without --consistency")
    if text is not None:
        raise ConfigError("--text has no effect without --against")
    for name in (SAMPLE_PROBLEMS, SAMPLE_TEXT):
        if not (directory / name).is_file():
            raise ConfigError(f"no {name} in {directory}; give a directory with held-out text and problems as --data")
    texts = measures.read_some(directory / SAMPLE_TEXT, None)
    if consistency:
        agreement = _consistency(model, texts, prompts, max_num_seqs, schedule_invariant, console)
        if output is not None:
            output.write_text(json.dumps(agreement, indent=1) + "\n")
        return
    tasks = measures.read_some(directory / SAMPLE_PROBLEMS, problems)
    tokenizer, loaded = (
        require_tokenizer(model),
        load_model(model, dtype="float32", quantization=quantization, progress=False),
    )
    flags: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": 2048, "warmup": False}
    flags |= {"state_block_size": 128, "quantization": quantization}
    figures: dict[str, Any] = {"model": model, "bits_per_byte": {}}

    sources = sorted({document["id"].split(":")[0] for document in texts})
    groups = {name: [d for d in texts if d["id"].startswith(name + ":")] for name in sources} | {"maths": tasks}
    for name, documents in groups.items():
        figures["bits_per_byte"][name] = measures.bits_per_byte(loaded, tokenizer, documents)
        console.print(f"bits per byte, {name}: {figures['bits_per_byte'][name]:.4f}")

    plain = measures.run_cell(model, "none", "none", tasks, shots=0, flags=flags)
    figures["accuracy"] = {"correct": plain.correct, "problems": len(tasks), "right": plain.right}
    console.print(f"problems answered exactly: {plain.correct} of {len(tasks)} ({plain.correct / len(tasks):.1%})")

    has_mtp = bool(load_config(model).mtp_pattern) and loaded.mtp is not None
    if has_mtp and prompts:
        figures["acceptance"] = _acceptance(model, tokenizer, texts, tasks, prompts, flags, console)
        figures["one_at_a_time"] = _one_at_a_time(model, tasks, flags, console)
    if table:
        names = [name for name in measures.DRAFTS if has_mtp or not name.startswith("MTP")]
        figures["table"] = _table(model, loaded, tasks[:table_problems], names, shots, flags, console)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    if any(row["sure_of_another"] for row in figures.get("table", ())):
        raise typer.Exit(1)


def _compare(
    model: str, quantization: str | None, against: str, text: Path, output: Path | None, console: Console
) -> None:
    """Compares the model's predictions with those of `against`, both in float32."""
    from checkpoints.load import load_model
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.corpus import text_of
    from serving.cli.evaluation import measures
    from serving.cli.evaluation.comparison import compare

    if not text.is_file():
        raise ConfigError(f"{text}: no such file; give a text file as --text")
    tokenizer = require_tokenizer(against)
    documents = (
        [text_of(document) for document in measures.read_some(text, None)]
        if text.suffix == ".jsonl"
        else [text.read_text(encoding="utf-8")]
    )
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tokens = [token for each in documents for token in (*bos, *tokenizer.encode(each, add_special_tokens=False))]
    own = load_model(model, dtype="float32", quantization=quantization, progress=False)
    try:
        result = compare(own, load_model(against, dtype="float32", progress=False), tokens)
    except ValueError as error:
        raise ConfigError(f"{model} against {against}: {error}") from None
    console.print(f"{result.tokens:,} tokens of {text.name}", markup=False)
    console.print(f"KL divergence: {result.kl:.5f} nats per token, {result.largest_kl:.3f} at most")
    console.print(f"the same likeliest token: {result.agreement:.2%}")
    console.print(f"nats per token: {result.nats:.4f}, and {result.reference_nats:.4f} by {against}", markup=False)
    if output is not None:
        output.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")


def _consistency(
    model: str, texts: Any, count: int, max_num_seqs: int, schedule_invariant: bool, console: Console
) -> dict[str, Any]:
    """Tables of the differences between serving and training, in float32 and bfloat16."""
    from checkpoints.load import load_model
    from checkpoints.tokenizer import require_tokenizer
    from serving.cli.evaluation import consistency, measures

    prompts = measures.text_prompts(require_tokenizer(model), texts, count)
    figures: dict[str, Any] = {"model": model}
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(model, dtype=dtype, progress=False)
        flags = {
            "dtype": dtype, "max_num_seqs": max_num_seqs, "max_model_len": 512, "warmup": False, "tile_size": 32,
            "state_block_size": 64, "schedule_invariant": schedule_invariant,
        }  # fmt: skip
        table = Table(title=f"{model}, {dtype}: serving against training, per token")
        for heading in ("arrangement", "tokens", "cached tokens", "KL (nats)", "largest difference", "equal bits"):
            table.add_column(heading, justify="left" if heading == "arrangement" else "right")
        agreements = consistency.agreements(model, loaded, prompts, max_tokens=64, flags=flags)
        for one in agreements:
            table.add_row(
                one.arrangement,
                f"{one.tokens}",
                f"{one.cached_tokens}",
                f"{one.kl:.1e}",
                f"{one.largest:.1e}",
                f"{one.equal} of {one.tokens}",
            )
        console.print(table)
        figures[dtype] = [dataclasses.asdict(one) for one in agreements]
    return figures


def _acceptance(
    model: str, tokenizer: Any, texts: Any, tasks: Any, count: int, flags: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Measures how many of three drafts are accepted, on greedy continuations of held-out text and on problems."""
    from serving.cli.evaluation import measures
    from serving.engine.llm import LLM
    from serving.engine.requests.sampling_params import SamplingParams

    llm = LLM(model, **flags, **measures.DRAFTS["MTP, K=3"])
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(measures.text_prompts(tokenizer, texts, count), params)
    answers, _ = measures.run_problems(llm, tasks[:count])
    figures = {}
    for name, done in (("text", outputs), ("maths", answers)):
        figures[name] = _figures(measures.total_stats(done))
        rates = ", ".join(f"{rate:.3f}" for rate in figures[name]["rates"])
        length = figures[name]["mean_accepted_length"]
        console.print(f"MTP, K=3, {name}: mean accepted length {length:.2f}; by position {rates}")
    return figures


def _one_at_a_time(model: str, tasks: Any, flags: dict[str, Any], console: Console) -> dict[str, float]:
    """Returns the tokens per second of one sequence by number of drafts: the better of two interleaved runs."""
    from serving.cli.evaluation import measures
    from serving.engine.llm import LLM

    options: dict[str, dict[str, Any]] = {"none": {}} | {
        f"K={k}": {"speculative_method": "mtp", "num_speculative_tokens": k, "adaptive_drafts": False}
        for k in (1, 2, 3)
    }
    options["adaptive"] = {"speculative_method": "mtp", "num_speculative_tokens": 3}
    engines = {name: LLM(model, **{**flags, "max_num_seqs": 1}, **more) for name, more in options.items()}
    speeds = dict.fromkeys(engines, 0.0)
    for turn in range(2):
        for name, llm in engines.items():
            outputs, seconds = measures.run_problems(llm, tasks[:10], one_by_one=True, salt=f"turn {turn}")
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            speeds[name] = max(speeds[name], tokens / seconds)
    for name, speed in speeds.items():
        console.print(f"one at a time, drafts {name}: {speed:.0f} tokens/s, {speed / speeds['none']:.2f} times none")
    return speeds


def _table(
    model: str, loaded: Any, tasks: Any, names: list[str], shots: int, flags: dict[str, Any], console: Console
) -> list[dict[str, Any]]:
    from serving.cli.evaluation import measures

    cells = [
        measures.run_cell(model, cache, name, tasks, shots=shots, flags=flags)
        for cache in measures.CACHE_MODES
        for name in names
    ]
    table = Table(title=f"{len(tasks) - shots} problems, each after {shots} solved ones; greedy, float32")
    for heading in ("cache", "drafts", "correct", "tokens/s", "cached tokens", "accepted length", "other outputs"):
        table.add_column(heading, justify="left" if heading in ("cache", "drafts") else "right")
    rows = []
    for cell in cells:
        differ, sure = measures.disagreements(loaded, cells[0], cell)
        row = {
            "cache": cell.cache,
            "drafts": cell.drafts,
            "correct": cell.correct,
            "tokens_per_second": cell.tokens / cell.seconds,
            "cached_tokens": cell.cached_tokens,
            **_figures(cell.stats),
            "other_outputs": differ,
            "sure_of_another": sure,
        }
        rows.append(row)
        other = f"{differ}" + (f" ({differ - sure} at ties)" if differ else "")
        table.add_row(
            cell.cache, cell.drafts, f"{cell.correct}", f"{row['tokens_per_second']:.0f}", f"{cell.cached_tokens}",
            f"{row['mean_accepted_length']:.2f}", other,
        )  # fmt: skip
    console.print(table)
    return rows


def _figures(stats: DraftStats) -> dict[str, Any]:
    return {"mean_accepted_length": stats.mean_acceptance_length, "rates": stats.acceptance_at}
