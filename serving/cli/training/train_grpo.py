"""`mamba-jax train-grpo`: reinforcement learning with a verifiable reward and rollouts in the same process."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.options import check_replaceable
from serving.cli.training.progress import training_console, weights_of
from serving.config import ConfigError

_LONGEST_PROMPT = 96


def train_grpo(
    model: Annotated[str, typer.Option(help="Hugging Face directory with a tokenizer, or 'demo'.")] = "demo",
    problems: Annotated[
        Path | None, typer.Option(help='Maths problems: JSON lines with "question". Unset: the model\'s held-out ones.')
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to create with the model or adapter.")] = None,
    log: Annotated[Path | None, typer.Option(help="File for a JSON line per step.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 60,
    prompts_per_step: Annotated[int, typer.Option(min=1, help="Problems per step.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Answers to each problem.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 48,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate. Unset: 3e-4, or 1e-3 with --lora.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter; the model's weights stay.")] = False,
    rank: Annotated[int, typer.Option(min=1, max=512, help="With --lora: rank of the matrices of each layer.")] = 8,
    alpha: Annotated[float, typer.Option(help="With --lora: the adapter is multiplied by alpha / rank.")] = 16.0,
    target_modules: Annotated[
        str, typer.Option(help="With --lora: last parts of module names, separated by commas, or all-linear.")
    ] = "all-linear",
    schedule_invariant: Annotated[
        bool,
        typer.Option(
            "--schedule-invariant", help="Rollouts and trainer compute log-probabilities with the same bits, on CPU."
        ),
    ] = False,
    held_out: Annotated[
        int, typer.Option(min=1, help="Number of problems at the end of the file that are used for evaluation only.")
    ] = 40,
    seed: Annotated[int, typer.Option(help="Seed of prompts and answers.")] = 0,
) -> None:
    """Train a model by GRPO on maths problems. The reward checks the arithmetic in an answer."""
    import optax

    from checkpoints.adapters.adapter_export import target_layers
    from checkpoints.export import write_hugging_face
    from checkpoints.json_file import read_json
    from checkpoints.load import load_config
    from checkpoints.resolve import resolve
    from checkpoints.tokenizer import require_tokenizer
    from mamba_jax.train.additions import is_trained, new_adapter
    from mamba_jax.train.corpus import SAMPLE_PROBLEMS, problem_prompt, read_documents
    from mamba_jax.train.policy import PolicyTrainer, arithmetic_reward
    from mamba_jax.train.score import check_score
    from serving.cli.training.rollouts import Prompt, Rollouts, ServedAdapter, TrainingRound, improve
    from serving.engine.llm import LLM

    console = training_console(output)
    check_replaceable("--log", log, "train-grpo", lambda record: record.keys() >= {"step", "reward"})
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise ConfigError(f"--learning-rate {learning_rate}: a number above 0 is expected")
    path = problems or resolve(model).files / SAMPLE_PROBLEMS
    if not path.is_file():
        raise ConfigError(f"--problems {path}: no such file")
    tokenizer = require_tokenizer(model)
    every: list[Prompt] = [
        {"prompt_token_ids": ids}
        for document in read_documents(path, needs=("question",))
        if len(ids := tokenizer.encode(problem_prompt(document))) <= _LONGEST_PROMPT
    ]
    if len(every) <= held_out:
        raise ConfigError(f"--problems {path}: {len(every)} problems are short enough, but --held-out is {held_out}")
    config = load_config(model)
    if schedule_invariant:
        try:
            check_score(config)
        except ValueError as error:
            raise ConfigError(f"--schedule-invariant: {error}") from None
    values: Any = {}
    if lora:
        values = new_adapter(config, target_layers(config, target_modules), rank=rank, alpha=alpha, seed=seed)
    length = _LONGEST_PROMPT + max_tokens
    llm = LLM(
        model, dtype="float32", max_model_len=length + 1, max_num_seqs=64, state_block_size=128, tile_size=32,
        enable_lora=lora, max_loras=1, max_lora_rank=rank, schedule_invariant=schedule_invariant,
    )  # fmt: skip
    values |= weights_of(llm.model)
    rate = learning_rate if learning_rate is not None else 1e-3 if lora else 3e-4
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))
    trainer = PolicyTrainer(
        llm.model.config,
        values,
        optimizer,
        trained=is_trained if lora else lambda name: True,
        schedule_invariant=schedule_invariant,
    )
    begin = time.monotonic()

    def update(values: Any, version: str) -> None:
        if adapter is None:
            llm.update_weights(values, version=version)
        else:
            adapter.update(values)

    def show(done: TrainingRound) -> None:
        seconds = time.monotonic() - begin
        figures = ", ".join(f"{name} {value:.2g}" for name, value in done.figures.items())
        console.print(f"step {done.step + 1}: reward {done.reward:.3f}, {figures}, {seconds:.0f} s")
        if log is not None:
            with log.open("a") as file:
                record = {"step": done.step + 1, "reward": done.reward, "seconds": seconds, **done.figures}
                file.write(json.dumps(record) + "\n")

    with tempfile.TemporaryDirectory() as files:
        adapter = ServedAdapter(llm, Path(files), alpha=alpha, base=model) if lora else None
        if adapter is not None:
            adapter.update(values)
        rollouts = Rollouts(
            llm, lambda answer: arithmetic_reward(answer.text), samples=samples, max_tokens=max_tokens, length=length,
            lora_request=None if adapter is None else adapter.lora_request,
        )  # fmt: skip
        _, before = rollouts.sample(every[-held_out:], seed=seed)
        console.print(f"reward on {held_out} held-out problems: {before:.3f}")
        improve(
            update, trainer, rollouts, every[:-held_out], steps=steps, prompts_per_step=prompts_per_step, seed=seed,
            progress=show,
        )  # fmt: skip
        _, after = rollouts.sample(every[-held_out:], seed=seed)
    typer.echo(f"reward on {held_out} held-out problems: {before:.3f} before, {after:.3f} after {steps} steps")
    if output is None:
        return
    if adapter is not None:
        adapter.write(output, trainer.values)
        return
    source = resolve(model).files
    write_hugging_face(
        output, llm.model.config, trainer.values, read_json(source / "config.json"), dtype="float32", files_from=source
    )
