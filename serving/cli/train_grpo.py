"""`mamba-jax train-grpo`: raise a reward that can be checked, with rollouts by the engine in the same process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serving.config import ConfigError

_LONGEST_PROMPT = 96


def train_grpo(
    model: Annotated[str, typer.Option(help="Hugging Face directory with a tokenizer, or 'demo'.")] = "demo",
    problems: Annotated[
        Path | None, typer.Option(help='Maths problems: JSON lines with "question". Unset: the model\'s held-out ones.')
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to create with the improved model.")] = None,
    log: Annotated[Path | None, typer.Option(help="File for a JSON line per step.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 60,
    prompts_per_step: Annotated[int, typer.Option(min=1, help="Problems per step.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Answers to each problem.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 48,
    learning_rate: Annotated[float, typer.Option(help="Learning rate.")] = 3e-4,
    held_out: Annotated[int, typer.Option(min=1, help="Last problems of the file, kept to measure by.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of prompts and answers.")] = 0,
) -> None:
    """Train a model by GRPO to come to a result with right sums: what can be checked in an answer is rewarded."""
    import optax

    from checkpoints.export import write_hugging_face
    from checkpoints.json_file import read_json
    from checkpoints.load import require_tokenizer
    from checkpoints.resolve import resolve
    from mamba_jax.model import parameters
    from mamba_jax.train.arithmetic import arithmetic_reward
    from mamba_jax.train.corpus import SAMPLE_PROBLEMS, problem_prompt, read_documents
    from mamba_jax.train.policy import PolicyTrainer
    from serving.cli.grpo import Prompt, Rollouts, Round, improve
    from serving.engine.llm import LLM

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if output is not None and output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: already exists and is not empty")
    path = problems or resolve(model).files / SAMPLE_PROBLEMS
    if not path.is_file():
        raise ConfigError(f"--problems {path}: no such file")
    tokenizer = require_tokenizer(model)
    every: list[Prompt] = [
        {"prompt_token_ids": ids}
        for document in read_documents(path)
        if len(ids := tokenizer.encode(problem_prompt(document))) <= _LONGEST_PROMPT
    ]
    if len(every) <= held_out:
        raise ConfigError(f"--problems {path}: {len(every)} short enough problems, of which {held_out} are held out")
    length = _LONGEST_PROMPT + max_tokens
    llm = LLM(model, dtype="float32", max_model_len=length + 1, max_num_seqs=64, state_block_size=128, tile_size=32)
    values: Any = {name: leaf.get_value() for name, leaf in parameters(llm.model).items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate, b2=0.99))
    trainer = PolicyTrainer(llm.model.config, values, optimizer)
    rollouts = Rollouts(
        llm, lambda answer: arithmetic_reward(answer.text), samples=samples, max_tokens=max_tokens, length=length
    )
    begin = time.monotonic()

    def show(done: Round) -> None:
        seconds = time.monotonic() - begin
        figures = ", ".join(f"{name} {value:.2g}" for name, value in done.figures.items())
        console.print(f"step {done.step + 1}: reward {done.reward:.3f}, {figures}, {seconds:.0f} s")
        if log is not None:
            with log.open("a") as file:
                record = {"step": done.step + 1, "reward": done.reward, "seconds": seconds, **done.figures}
                file.write(json.dumps(record) + "\n")

    before = rollouts.mean_reward(every[-held_out:], seed=seed)
    console.print(f"reward on {held_out} held-out problems: {before:.3f}")
    improve(
        llm, trainer, rollouts, every[:-held_out], steps=steps, prompts_per_step=prompts_per_step, seed=seed,
        progress=show,
    )  # fmt: skip
    after = rollouts.mean_reward(every[-held_out:], seed=seed)
    typer.echo(f"reward on {held_out} held-out problems: {before:.3f} before, {after:.3f} after {steps} steps")
    if output is not None:
        files = resolve(model).files
        write_hugging_face(
            output,
            llm.model.config,
            trainer.values,
            read_json(files / "config.json"),
            dtype="float32",
            files_from=files,
        )
