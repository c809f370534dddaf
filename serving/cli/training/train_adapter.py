"""`mamba-jax train-lora` and `mamba-jax train-s0`: train what is added to a model whose weights stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.training.progress import finished, run_folder, training_console, training_errors, weights_of

_MODEL = typer.Option(help="Model that is adapted: a Hugging Face directory with a tokenizer, or demo.")
_DATA = typer.Option(help='Text to train on: JSON lines with "text", or a prepared corpus.')
_OUTPUT = typer.Option(help="Directory to create for the adapter.")
_STEPS = typer.Option(min=1, help="Number of training steps.")
_BATCH = typer.Option(min=1, help="Sequences per step.")
_LENGTH = typer.Option(min=2, help="Tokens per sequence.")
_RATE = typer.Option(help="Peak learning rate.")
_HELD_OUT = typer.Option(help="Proportion of documents that is not trained on; its loss is printed before and after.")
_DTYPE = typer.Option(help="Data type of computations: float32 or bfloat16.")
_REMATERIALIZE = typer.Option(help="Keep only the inputs of each layer for the gradient, and compute the rest again.")
_SEED = typer.Option(help="Seed of the initial values and of the data order.")
_RUN = typer.Option(help="Directory for training state and log; makes the run resumable.")


def train_lora(
    model: Annotated[str, _MODEL],
    data: Annotated[Path, _DATA],
    output: Annotated[Path, _OUTPUT],
    rank: Annotated[int, typer.Option(min=1, help="Rank of the matrices of each layer.")] = 8,
    alpha: Annotated[float, typer.Option(help="The adapter is multiplied by alpha / rank.")] = 16.0,
    target_modules: Annotated[
        str, typer.Option(help="Last parts of module names, separated by commas; all-linear: every dense layer.")
    ] = "all-linear",
    steps: Annotated[int, _STEPS] = 100,
    batch_size: Annotated[int, _BATCH] = 8,
    sequence_length: Annotated[int, _LENGTH] = 256,
    learning_rate: Annotated[float, _RATE] = 1e-3,
    held_out: Annotated[float, _HELD_OUT] = 0.1,
    compute_dtype: Annotated[str, _DTYPE] = "float32",
    rematerialize: Annotated[bool, _REMATERIALIZE] = False,
    seed: Annotated[int, _SEED] = 0,
    run: Annotated[Path | None, _RUN] = None,
) -> None:
    """Train a LoRA adapter, and write it as PEFT does."""
    from checkpoints.adapters.adapter_export import target_layers, write_adapter
    from mamba_jax.train.additions import adapter_modules, new_adapter

    targets = tuple(name.strip() for name in target_modules.split(","))

    def start(config: Any) -> dict[str, Any]:
        return new_adapter(config, target_layers(config, targets), rank=rank, alpha=alpha, seed=seed)

    def write(config: Any, values: dict[str, Any]) -> None:
        import jax
        import numpy as np

        modules = jax.tree.map(np.asarray, adapter_modules(values))
        write_adapter(output, modules, config, alpha=alpha, base=model)

    settings = {
        "steps": steps, "batch_size": batch_size, "sequence_length": sequence_length, "seed": seed,
        "compute_dtype": compute_dtype, "rematerialize": rematerialize,
    }  # fmt: skip
    _train(model, data, output, settings, learning_rate, held_out, run, start, write)


def train_s0(
    model: Annotated[str, _MODEL],
    data: Annotated[Path, _DATA],
    output: Annotated[Path, _OUTPUT],
    steps: Annotated[int, _STEPS] = 100,
    batch_size: Annotated[int, _BATCH] = 8,
    sequence_length: Annotated[int, _LENGTH] = 256,
    learning_rate: Annotated[float, _RATE] = 1e-2,
    weight_decay: Annotated[float, typer.Option(help="Decay of the states, towards zeros.")] = 0.01,
    windows: Annotated[bool, typer.Option("--windows", help="Also train the windows of convolutions.")] = False,
    held_out: Annotated[float, _HELD_OUT] = 0.1,
    compute_dtype: Annotated[str, _DTYPE] = "float32",
    rematerialize: Annotated[bool, _REMATERIALIZE] = False,
    seed: Annotated[int, _SEED] = 0,
    run: Annotated[Path | None, _RUN] = None,
) -> None:
    """Train the initial states of recurrences ("S0 tuning"): requests then start from them, not from zeros."""
    from checkpoints.adapters.initial_state import parts_of, write_initial_state
    from mamba_jax.train.additions import initial_states, new_initial_states

    def start(config: Any) -> dict[str, Any]:
        return new_initial_states(config, windows=windows)

    def write(config: Any, values: dict[str, Any]) -> None:
        import jax
        import numpy as np

        states = jax.tree.map(np.asarray, initial_states(values))
        layers = {index: parts_of(config, index, arrays) for index, arrays in states.items()}
        write_initial_state(output, layers, config)

    settings = {
        "steps": steps, "batch_size": batch_size, "sequence_length": sequence_length, "seed": seed,
        "compute_dtype": compute_dtype, "rematerialize": rematerialize,
    }  # fmt: skip
    # A request starts from the state with its first token, so training separates documents.
    _train(model, data, output, settings, learning_rate, held_out, run, start, write, weight_decay, separate=True)


def _train(
    model: str,
    data: Path,
    output: Path,
    fields: dict[str, Any],
    learning_rate: float,
    held_out: float,
    run: Path | None,
    start: Callable[[Any], dict[str, Any]],
    write: Callable[[Any, dict[str, Any]], None],
    weight_decay: float = 0.0,
    separate: bool = False,
) -> None:
    """Trains the values of `start(config)`, and passes the trained ones to `write(config, values)`."""
    import jax

    from checkpoints.load import load_weights
    from checkpoints.resolve import resolve
    from checkpoints.text.training_data import corpus_digest
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.additions import is_trained
    from mamba_jax.train.config import DataSettings, DraftSettings, OptimizerSettings, TrainConfig
    from mamba_jax.train.loop import check_run
    from mamba_jax.train.loss import DRAFT_LAYER
    from mamba_jax.train.recipe import keep_recipe
    from mamba_jax.train.validation import Validation
    from serving.cli.training.train import read_data

    console = training_console(output, data)
    require_tokenizer(model)
    files, weights = resolve(model).files, load_weights(model, dtype="float32")
    config = dataclasses.replace(weights.model.config, mtp_pattern="")
    with training_errors(console), run_folder(run) as directory:
        values = {path: leaf for path, leaf in weights_of(weights.model).items() if not path.startswith(DRAFT_LAYER)}
        values |= start(config)
        steps = fields["steps"]
        settings = TrainConfig(
            data=DataSettings(held_out=held_out, separate_documents=separate),
            optimizer=OptimizerSettings(
                learning_rate=learning_rate, warmup_steps=min(20, steps // 5), weight_decay=weight_decay
            ),
            drafts=DraftSettings(depth_weights=()),
            validate_every=steps,
            **fields,
        )
        devices = jax.devices()[: math.gcd(settings.batch_size, len(jax.devices()))]
        check_run(settings, config, len(devices))
        if run is not None:
            keep_recipe(run, settings, corpus_digest=corpus_digest(data), model=weights.digest)
        batches, sequences = read_data(settings, data, files, directory, console)
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
    console.print(f"{output}", markup=False)
