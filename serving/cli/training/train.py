"""`mamba-jax train`: train a model on a corpus, from random weights or from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from serving.cli.training.progress import training_bar, training_console, weights_of
from serving.config import ConfigError
from serving.settings import yaml_assignment

if TYPE_CHECKING:
    from checkpoints.load import LoadedWeights

TOKENS = "tokens.npz"
"""The tokenized corpus, in the folder of a run."""


def train(
    output: Annotated[Path, typer.Option(help="Directory for state, log and model; a run in it is resumed.")],
    config: Annotated[Path | None, typer.Option(help="YAML or TOML file of the run. Required without --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to fine-tune: a Hugging Face directory.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Corpus, or a .jsonl file; overrides the config file's.")] = None,
    validation: Annotated[Path | None, typer.Option(help="A .jsonl file, or a corpus with heldout/.")] = None,
    set: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; overrides the config file's; repeatable.")] = None,
) -> None:
    """Train or fine-tune a model and write it to OUTPUT/model as a Hugging Face directory."""
    from checkpoints.export import save_hugging_face, write_hugging_face
    from checkpoints.load import source_dtype
    from checkpoints.resolve import resolve
    from checkpoints.text.training_data import check_sources, corpus_digest, write_tokenizer
    from mamba_jax.families import config_from_hf
    from mamba_jax.train.config import FINE_TUNING, read_config
    from mamba_jax.train.corpus import write_sample
    from mamba_jax.train.loop import LOG, check_run, plot_losses, read_log
    from mamba_jax.train.loop import train as run_training
    from mamba_jax.train.loss import DRAFT_LAYER, build
    from mamba_jax.train.recipe import keep_recipe
    from mamba_jax.version import install_advice

    console = training_console(None)
    if config is None and model is None:
        raise ConfigError("train: give --config (a new model) or --model (fine-tuning)")
    overrides = dict(yaml_assignment("--set", assignment) for assignment in set or ())
    if validation is not None:
        overrides["data.validation"] = str(validation)
    settings = read_config(config or FINE_TUNING, overrides)
    source = corpus if corpus is not None else Path(settings.data.corpus)
    # A run whose corpus was removed continues with the tokens in its folder.
    has_corpus = corpus is not None or source.exists() or not (output / TOKENS).is_file()
    digest = corpus_digest(source) if has_corpus else None
    loaded = None if model is None else _existing_model(model, settings)
    described = config_from_hf(settings.model) if loaded is None else loaded.model.config
    values = None if loaded is None else weights_of(loaded.model)
    check_run(settings, described)
    if has_corpus:
        check_sources(source, settings.data)
    keep_recipe(output, settings, corpus_digest=digest, model=None if loaded is None else loaded.digest)
    tokenizer = output / "tokenizer" if model is None else resolve(model).files
    if model is None and not (tokenizer / "tokenizer.json").is_file():
        with console.status("Training the tokenizer"):
            write_tokenizer(source, tokenizer, described.vocab_size)
    batches, held_out = read_data(settings, source, tokenizer, output, console)
    with training_bar(settings.steps, console) as show:
        # Muon normalizes gradients, so parameters without a loss must be excluded or they would drift.
        drafting = bool(settings.drafts.depth_weights)
        run = run_training(
            settings, described, batches, output, values=values, validation=held_out, progress=show,
            trained=lambda path: drafting or not path.startswith(DRAFT_LAYER),
        )  # fmt: skip
    if not run.finished:
        console.print(f"interrupted after {run.steps} steps; run the same command again to resume", markup=False)
    if model is None:
        write_hugging_face(
            output / "model", described, run.values, settings.model, dtype="bfloat16", files_from=tokenizer
        )
    else:
        # In the dtype and with the files of the original model.
        trained = build(described, run.values, source_dtype(model))
        save_hugging_face(output / "model", trained, tokenizer, overwrite=True)
    if (source / "heldout").is_dir():
        write_sample(source, output / "model")
    records = read_log(output / LOG)
    if plot_losses(records, output / "loss.svg"):
        console.print(f"{output / 'loss.svg'}", markup=False)
    elif records:
        console.print(f"loss.svg is not drawn: {install_advice('plots')}", markup=False)
    console.print(f"{output / 'model'}", markup=False)
    sys.stdout.flush()


def _existing_model(ref: str, settings: Any) -> LoadedWeights:
    from checkpoints.load import Checkpoint
    from checkpoints.resolve import resolve
    from checkpoints.tokenizer import require_tokenizer

    if settings.model:
        raise ConfigError("--model gives the architecture: remove `model` from the config file")
    if not (resolve(ref).files / "config.json").is_file():
        raise ConfigError(f"--model {ref}: has no config.json; convert it with `mamba-jax convert --form hugging-face`")
    require_tokenizer(ref)
    return Checkpoint(ref, dtype="float32").load_identified()


def read_data(settings: Any, corpus: Path, tokenizer_files: Path, output: Path, console: Console) -> tuple[Any, Any]:
    """Returns the batches of the run, and the sequences of its validation loss, if any."""
    from checkpoints.text.training_data import load_streams, shares_of
    from checkpoints.tokenizer import read_tokenizer
    from mamba_jax.train.data import Batches, hold_out, read_streams, save_streams
    from mamba_jax.train.loss import validation_sequences

    tokenizer = read_tokenizer(tokenizer_files)
    assert tokenizer is not None
    kept = output / TOKENS
    if kept.is_file():
        streams = read_streams(kept)
    else:
        with console.status("Tokenizing the corpus"):
            streams = load_streams(corpus, tokenizer, settings.data)
            save_streams(kept, streams)
    held_out = None
    source = Path(settings.data.validation) if settings.data.validation else corpus
    if settings.data.validation or (corpus / "heldout").is_dir():
        with console.status("Tokenizing the validation data"):
            held_out = load_streams(source, tokenizer, settings.data, part="heldout")
    elif settings.data.held_out:
        streams, held_out = hold_out(streams, settings.data.held_out)
    length = settings.sequence_length + 1
    shares = shares_of(streams, settings.data)
    separate = settings.data.separate_documents
    batches = Batches(
        streams, shares, batch_size=settings.batch_size, length=length, seed=settings.seed, separate=separate
    )
    if held_out is None:
        return batches, None
    limit = settings.validation_sequences
    return batches, validation_sequences(held_out, length=length, limit=limit, separate=separate)
