"""`mamba-jax train-mtp`, `train-lora` and `train-s0`: train what is added to a model whose weights stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from serving.cli.options import Options, with_options
from serving.cli.training.progress import finished, run_folder, training_console, weights_of
from serving.settings import Settings


class TrainingOptions(Settings):
    """What these commands have in common."""

    model: str = Field(description="Hugging Face directory with a tokenizer, or (not for a draft layer) demo.")
    data: Path = Field(description='Text to train on: JSON lines with "text", or a prepared corpus.')
    output: Path = Field(description="Directory to create for the adapter, or for the model's files and a draft layer.")
    run: Path | None = Field(None, description="Directory for training state and log; makes the run resumable.")
    steps: int = Field(100, ge=1, description="Number of steps. Unset: 100, or 500 for a draft layer.")
    batch_size: int = Field(8, ge=1, description="Sequences per step.")
    sequence_length: int = Field(256, ge=2, description="Tokens of each. Unset: 256, or 512 for a draft layer.")
    learning_rate: float = Field(
        1e-3, description="Peak learning rate. Unset: 1e-3, or 1e-2 for states and 2e-3 for a draft layer."
    )
    held_out: float = Field(
        0.1, description="Proportion of documents that is not trained on; its loss is printed before and after."
    )
    compute_dtype: str = Field("float32", description="Data type of computations: float32 or bfloat16.")
    rematerialize: bool = Field(
        False, description="Keep only the inputs of each layer for the gradient, and compute the rest again."
    )
    seed: int = Field(0, description="Seed of the initial values and of the data order.")


TrainingOptions.COMMON = tuple(TrainingOptions.model_fields)
_OPTIONS = Options("options", TrainingOptions, "Training")
_OF_SETTINGS = {"steps", "batch_size", "sequence_length", "compute_dtype", "rematerialize", "seed"}
"""Options that have the name of a training setting."""


@with_options(_OPTIONS)
def train_lora(
    *,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the matrices of each layer.")] = 8,
    alpha: Annotated[float, typer.Option(help="The adapter is multiplied by alpha / rank.")] = 16.0,
    target_modules: Annotated[
        str, typer.Option(help="Last parts of module names, separated by commas; all-linear: every dense layer.")
    ] = "all-linear",
    options: dict[str, Any],
) -> None:
    """Train a LoRA adapter, and write it as PEFT does."""
    from checkpoints.adapters.adapter_export import target_layers, write_adapter
    from mamba_jax.train.additions import adapter_modules, new_adapter

    chosen = TrainingOptions.create(**options)

    def start(config: Any) -> dict[str, Any]:
        return new_adapter(config, target_layers(config, target_modules), rank=rank, alpha=alpha, seed=chosen.seed)

    def write(config: Any, values: dict[str, Any]) -> None:
        write_adapter(chosen.output, adapter_modules(values), config, alpha=alpha, base=chosen.model)

    _train(chosen, start, write)


@with_options(_OPTIONS)
def train_s0(
    *,
    weight_decay: Annotated[float, typer.Option(help="Decay of the states, towards zeros.")] = 0.01,
    windows: Annotated[bool, typer.Option("--windows", help="Also train the windows of convolutions.")] = False,
    options: dict[str, Any],
) -> None:
    """Train the initial states of recurrences ("S0 tuning"): requests then start from them, not from zeros."""
    from checkpoints.adapters.initial_state import parts_of, write_initial_state
    from mamba_jax.train.additions import initial_states, new_initial_states

    chosen = TrainingOptions.create(**{"learning_rate": 1e-2} | options)

    def write(config: Any, values: dict[str, Any]) -> None:
        states = {at: parts_of(config, at, arrays) for at, arrays in initial_states(values).items()}
        write_initial_state(chosen.output, states, config)

    # A request starts from the state with its first token, so training separates documents.
    _train(chosen, partial(new_initial_states, windows=windows), write, weight_decay, separate=True)


def _train(
    options: TrainingOptions,
    start: Callable[[Any], dict[str, Any]],
    write: Callable[[Any, dict[str, Any]], None],
    weight_decay: float = 0.0,
    separate: bool = False,
) -> None:
    """Trains the values of `start(config)`, and passes the trained ones to `write(config, values)`."""
    import jax

    from checkpoints.load import Checkpoint
    from checkpoints.resolve import resolve
    from checkpoints.text.training_data import corpus_digest
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.additions import is_trained
    from mamba_jax.train.config import train_config
    from mamba_jax.train.loop import check_run
    from mamba_jax.train.loss import DRAFT_LAYER, Validation
    from mamba_jax.train.recipe import keep_recipe
    from serving.cli.training.train import read_data

    run, console = options.run, training_console(options.output, options.data)
    require_tokenizer(options.model)
    files, weights = resolve(options.model).files, Checkpoint(options.model, dtype="float32").load_identified()
    config = dataclasses.replace(weights.model.config, mtp_pattern="")
    with run_folder(run) as directory:
        values = {path: leaf for path, leaf in weights_of(weights.model).items() if not path.startswith(DRAFT_LAYER)}
        values |= start(config)
        rate, warmup = options.learning_rate, min(20, options.steps // 5)
        settings = train_config({
            "data": {"held_out": options.held_out, "separate_documents": separate},
            "optimizer": {"learning_rate": rate, "warmup_steps": warmup, "weight_decay": weight_decay},
            "drafts": {"depth_weights": ()},
            "validate_every": options.steps,
            **options.model_dump(include=_OF_SETTINGS),
        })  # fmt: skip
        devices = jax.devices()[: math.gcd(settings.batch_size, len(jax.devices()))]
        check_run(settings, config, len(devices))
        if run is not None:
            keep_recipe(run, settings, corpus_digest=corpus_digest(options.data), model=weights.digest)
        batches, sequences = read_data(settings, options.data, files, directory, console)
        validation = None
        if sequences is not None:
            validation = Validation(
                sequences,
                batch_size=settings.batch_size,
                config=config,
                dtype=settings.compute_dtype,
                sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
                devices=1,
            )
            before = validation.loss(values)
        done = finished(run, settings, config, batches, console, values=values, trained=is_trained, devices=devices)
        write(config, done.values)
        count = sum(value.size for path, value in done.values.items() if is_trained(path))
        console.print(f"{count:,} numbers trained", markup=False)
        if validation is not None:
            after = validation.loss(jax.device_put(done.values, devices[0]))
            console.print(f"held-out loss {before:.4f} before, {after:.4f} after", markup=False)
    console.print(f"{options.output}", markup=False)


_DEPTH_WEIGHTS = (1.0, 0.8, 0.6)


@with_options(Options("options", TrainingOptions, "Training", without=("held_out", "rematerialize")))
def train_mtp(
    *,
    pattern: Annotated[
        str | None, typer.Option(help="Sublayers of a new layer: * attention, - MLP. Unset: *-.")
    ] = None,
    anew: Annotated[bool, typer.Option(help="Start from a new layer even if the model has one.")] = False,
    depth: Annotated[int, typer.Option(min=1, max=3, help="Number of consecutive drafts to train for.")] = 3,
    rollouts: Annotated[
        int, typer.Option(min=0, help="Tokens for the model to generate first; half of the training uses them.")
    ] = 0,
    options: dict[str, Any],
) -> None:
    """Train a draft layer by distillation, leaving the model itself unchanged."""
    from checkpoints.drafts import begun_draft_layer, with_draft_layer, write_with_draft_layer
    from checkpoints.load import load_config, load_model
    from checkpoints.text.training_data import corpus_digest, load_streams, shares_of
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.config import train_config
    from mamba_jax.train.data import Batches, read_streams, save_streams
    from mamba_jax.train.loop import check_run
    from mamba_jax.train.loss import DRAFT_LAYER
    from mamba_jax.train.recipe import keep_recipe
    from serving.cli.training.rollouts import own_text

    chosen = TrainingOptions.create(**{"steps": 500, "sequence_length": 512, "learning_rate": 2e-3} | options)
    model, data, output, run, seed = Path(chosen.model), chosen.data, chosen.output, chosen.run, chosen.seed
    console, tokenizer = training_console(output, data), require_tokenizer(model)
    raw, config = with_draft_layer(model, pattern or load_config(model).mtp_pattern or "*-")
    values = weights_of(load_model(model))
    start = begun_draft_layer(config, values, seed)
    if not anew:
        start |= {path: value for path, value in values.items() if path in start}
    values = {path: value for path, value in values.items() if not path.startswith(DRAFT_LAYER)} | start
    optimizer = {"name": "muon", "learning_rate": chosen.learning_rate, "warmup_steps": min(50, chosen.steps // 5)}
    settings = train_config({
        "optimizer": optimizer | {"schedule": "stable", "decay_steps": chosen.steps // 2, "weight_decay": 0.01},
        "drafts": {"depth_weights": _DEPTH_WEIGHTS[:depth], "targets": "model", "detach": True},
        **chosen.model_dump(include=_OF_SETTINGS),
    })  # fmt: skip
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
    length = chosen.sequence_length + 1
    batches = Batches(streams, shares, batch_size=chosen.batch_size, length=length, seed=seed)
    trained = lambda path: path.startswith(DRAFT_LAYER)  # noqa: E731
    done = finished(run, settings, config, batches, console, values=values, trained=trained, model_weight=0.0)
    write_with_draft_layer(model, output, raw, config, done.values)
    console.print(f"{output}", markup=False)
