"""`mamba-jax train-mtp`: train a multi-token-prediction layer for an existing model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serving.cli.training.progress import finished, training_console, training_errors, weights_of

_DEPTH_WEIGHTS = (1.0, 0.8, 0.6)


def train_mtp(
    model: Annotated[Path, typer.Option(help="Hugging Face directory with a tokenizer.")],
    data: Annotated[Path, typer.Option(help='Text to train on: JSON lines with "text", or a prepared corpus.')],
    output: Annotated[Path, typer.Option(help="Directory to create for the model's files and the new layer.")],
    pattern: Annotated[
        str | None, typer.Option(help="Sublayers of a new layer: * attention, - MLP. Unset: *-.")
    ] = None,
    anew: Annotated[bool, typer.Option(help="Start from a new layer even if the model has one.")] = False,
    steps: Annotated[int, typer.Option(help="Number of training steps.")] = 500,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    depth: Annotated[int, typer.Option(min=1, max=3, help="Number of consecutive drafts to train for.")] = 3,
    rollouts: Annotated[
        int,
        typer.Option(min=0, help="Tokens for the model to generate first; half of the training uses them."),
    ] = 0,
    compute_dtype: Annotated[str, typer.Option(help="Data type of computations: float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the layer's initial weights and of the data order.")] = 0,
    run: Annotated[
        Path | None, typer.Option(help="Directory for training state and log; makes the run resumable.")
    ] = None,
) -> None:
    """Train a draft layer by distillation, leaving the model itself unchanged."""
    from checkpoints.drafts.draft_layer import begun_draft_layer, with_draft_layer, write_with_draft_layer
    from checkpoints.load import load_config, load_model
    from checkpoints.text.training_data import corpus_digest, load_streams, shares_of
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.config import DataSettings, DraftSettings, OptimizerSettings, TrainConfig
    from mamba_jax.train.data import Batches, read_streams, save_streams
    from mamba_jax.train.loop import check_run
    from mamba_jax.train.loss import DRAFT_LAYER
    from mamba_jax.train.recipe import keep_recipe
    from serving.cli.training.rollouts import own_text

    console = training_console(output, data)
    tokenizer = require_tokenizer(model)
    raw, config = with_draft_layer(model, pattern or load_config(model).mtp_pattern or "*-")
    with training_errors(console):
        values = weights_of(load_model(model))
    start = begun_draft_layer(config, values, seed)
    if not anew:
        start |= {path: value for path, value in values.items() if path in start}
    values = {path: value for path, value in values.items() if not path.startswith(DRAFT_LAYER)} | start
    with training_errors(console):
        settings = TrainConfig(
            data=DataSettings(),
            optimizer=OptimizerSettings(
                name="muon",
                learning_rate=learning_rate,
                warmup_steps=min(50, steps // 5),
                schedule="stable",
                decay_steps=steps // 2,
                weight_decay=0.01,
            ),
            drafts=DraftSettings(depth_weights=_DEPTH_WEIGHTS[:depth], targets="model", detach=True),
            steps=steps,
            batch_size=batch_size,
            sequence_length=sequence_length,
            compute_dtype=compute_dtype,  # type: ignore[arg-type]
            seed=seed,
        )
        check_run(settings, config)
        if run is not None:
            keep_recipe(run, settings, corpus_digest=corpus_digest(data), model=str(model), rollouts=str(rollouts))
        with console.status("Tokenizing"):
            streams = load_streams(data, tokenizer, settings.data)
        shares = shares_of(streams, settings.data)
        if rollouts:
            kept = None if run is None else run / "rollouts.npz"
            if kept is not None and kept.is_file():
                streams |= read_streams(kept)
            else:
                with console.status("Generating text"):
                    streams["rollouts"] = own_text(model, streams, shares, tokens=rollouts, seed=seed)
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    save_streams(kept, {"rollouts": streams["rollouts"]})
            shares = shares | {"rollouts": sum(shares.values())}
        batches = Batches(streams, shares, batch_size=batch_size, length=sequence_length + 1, seed=seed)
        done = finished(
            run,
            settings,
            config,
            batches,
            console,
            values=values,
            trained=lambda path: path.startswith(DRAFT_LAYER),
            model_weight=0.0,
        )
    write_with_draft_layer(model, output, raw, config, done.values)
    console.print(f"{output}", markup=False)
