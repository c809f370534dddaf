"""`mamba-jax train`: train a model on a corpus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from serving.cli.train_progress import training_bar, training_errors
from serving.config import ConfigError

TOKENS = "tokens.npz"
"""The tokenised corpus, in the folder of a run."""


def train(
    config: Annotated[Path, typer.Option(help="YAML or TOML file that describes the run.")],
    output: Annotated[
        Path, typer.Option(help="Directory for training state, log and model. A run that it holds is resumed.")
    ],
    corpus: Annotated[Path | None, typer.Option(help="Prepared corpus; overrides the config file's.")] = None,
    set: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; overrides the config file's; repeatable.")] = None,
) -> None:
    """Train a model and write it to OUTPUT/model as a Hugging Face directory."""
    from checkpoints.export import write_hugging_face
    from checkpoints.train_tokenizer import write_tokenizer
    from checkpoints.training_data import corpus_digest
    from mamba_jax.families import config_from_hf
    from mamba_jax.train.config import read_config
    from mamba_jax.train.corpus import write_sample
    from mamba_jax.train.loop import LOG, read_log
    from mamba_jax.train.loop import train as run_training
    from mamba_jax.train.loss import DRAFT_LAYER
    from mamba_jax.train.plot import plot_losses
    from mamba_jax.train.recipe import keep_recipe

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with training_errors(console):
        settings = read_config(config, _overrides(set or []))
        model = config_from_hf(settings.model)
    source = corpus if corpus is not None else Path(settings.data.corpus)
    # A run whose corpus is gone goes on from the tokens in its folder.
    has_corpus = corpus is not None or source.exists() or not (output / TOKENS).is_file()
    with training_errors(console):
        keep_recipe(output, settings, corpus_digest=corpus_digest(source) if has_corpus else None)
    tokenizer = output / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        with console.status("Training the tokenizer"):
            write_tokenizer(source, tokenizer, model.vocab_size)
    with training_errors(console):
        batches = _batches(settings, source, output, console)
        with training_bar(settings.steps, console) as show:
            # Muon normalises gradients, so parameters without a loss must be excluded or they would drift.
            drafting = bool(settings.drafts.depth_weights)
            run = run_training(
                settings,
                model,
                batches,
                output,
                trained=lambda path: drafting or not path.startswith(DRAFT_LAYER),
                progress=show,
            )
    if not run.finished:
        console.print(f"interrupted after {run.steps} steps; run the same command again to resume", markup=False)
    write_hugging_face(output / "model", model, run.values, settings.model, files_from=tokenizer)
    if (source / "heldout").is_dir():
        write_sample(source, output / "model")
    records = read_log(output / LOG)
    if plot_losses(records, output / "loss.svg"):
        console.print(f"{output / 'loss.svg'}", markup=False)
    elif records:
        console.print("loss.svg is not drawn: install mamba-jax[plots]", markup=False)
    console.print(f"{output / 'model'}", markup=False)
    sys.stdout.flush()


def _batches(settings: Any, corpus: Path, output: Path, console: Console) -> Any:
    from checkpoints.tokenizer import read_tokenizer
    from checkpoints.training_data import load_streams, shares_of
    from mamba_jax.train.data import Batches, read_streams, save_streams

    kept = output / TOKENS
    if kept.is_file():
        streams = read_streams(kept)
    else:
        tokenizer = read_tokenizer(output / "tokenizer")
        assert tokenizer is not None
        with console.status("Tokenising the corpus"):
            streams = load_streams(corpus, tokenizer, settings.data)
            save_streams(kept, streams)
    length = settings.sequence_length + 1
    shares = shares_of(streams, settings.data)
    return Batches(streams, shares, batch_size=settings.batch_size, length=length, seed=settings.seed)


def _overrides(given: list[str]) -> dict[str, Any]:
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise ConfigError(f"--set {one}: expected NAME=VALUE")
        found[name] = yaml.safe_load(value)
    return found
