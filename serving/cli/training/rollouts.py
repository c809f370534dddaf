"""Training data that the engine samples from a model, for reinforcement learning and for draft layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array

from checkpoints.adapters.adapter_export import write_adapter
from mamba_jax.train.additions import adapter_modules
from mamba_jax.train.data import TokenStream
from mamba_jax.train.policy import Answers, PolicyTrainer, group_advantages
from serving.engine.llm import LLM
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.output import CompletionOutput, RequestOutput
from serving.engine.requests.sampling_params import SamplingParams

Reward = Callable[[CompletionOutput], float]
Prompt = dict[str, list[int]]
UpdateEngine = Callable[[dict[str, Array], str], object]
"""Called with the trainer's weights and a version. The engine has the weights when it returns."""
LEAST_PROMPT, MOST_PROMPT, CONTINUATION = 16, 128, 128
"""Minimum and maximum tokens of a prompt, and tokens of its continuation."""


@dataclass(frozen=True)
class TrainingRound:
    """The result of one step of a run."""

    step: int
    reward: float
    """Mean reward of all answers."""
    figures: dict[str, float]
    """The trainer's figures."""


@dataclass(frozen=True)
class Rollouts:
    """Samples answers from an engine, and converts them to batches for a trainer."""

    llm: LLM
    """Its draft source, cache mode and mesh do not affect the samples' distribution."""
    reward: Reward
    _: KW_ONLY
    samples: int
    """Answers per prompt, which share its prefill."""
    max_tokens: int
    length: int
    """Number of tokens to which prompt and answer are padded."""
    lora_request: LoRARequest | None = None
    """The adapter that answers are sampled with."""

    def sample(self, prompts: Sequence[Prompt], seed: int) -> tuple[Answers, float]:
        """Returns answers to all prompts, and their mean reward.

        Raises:
            RequestError: a prompt is too long.
        """
        params = [
            SamplingParams(n=self.samples, temperature=1.0, max_tokens=self.max_tokens, seed=seed + i, logprobs=0)
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate(list(prompts), params, lora_request=self.lora_request, use_tqdm=False)
        rewards = np.array([[self.reward(choice) for choice in output.outputs] for output in outputs])
        advantages = np.asarray(group_advantages(jnp.asarray(rewards, jnp.float32)))
        return self._answers(outputs, advantages.reshape(-1)), float(rewards.mean())

    def _answers(self, outputs: Sequence[RequestOutput], advantages: np.ndarray) -> Answers:
        pairs = [(output.prompt_token_ids, choice) for output in outputs for choice in output.outputs]
        tokens = np.zeros((len(pairs), self.length), np.int32)
        lengths = np.zeros(len(pairs), np.int32)
        answered = np.zeros((len(pairs), self.length - 1), bool)
        logprobs = np.zeros((len(pairs), self.length - 1), np.float32)
        for row, (prompt, choice) in enumerate(pairs):
            end = len(prompt) + len(choice.token_ids)
            tokens[row, :end] = [*prompt, *choice.token_ids]
            lengths[row] = end
            answered[row, len(prompt) - 1 : end - 1] = True
            drawn = zip(choice.token_ids, choice.logprobs or (), strict=True)
            logprobs[row, len(prompt) - 1 : end - 1] = [table[token].logprob for token, table in drawn]
        return Answers(*map(jnp.asarray, (tokens, lengths, answered, logprobs, advantages)))


class ServedAdapter:
    """A LoRA adapter that an engine serves while it is trained. Each update replaces it through its files.

    Args:
        llm: an engine with `enable_lora`, whose `max_lora_rank` is at least the adapter's rank.
        directory: where the engine reads the adapter; written at each update.
        alpha: B A is multiplied by alpha / rank.
        base: name of the base model, for the adapter's config.
    """

    def __init__(self, llm: LLM, directory: Path, *, alpha: float, base: str) -> None:
        self._llm, self._directory, self._alpha, self._base = llm, directory, alpha, base
        self.lora_request = LoRARequest("policy", 1, str(directory))

    def update(self, values: Mapping[str, Array]) -> None:
        """Loads the adapter among `values` (see `mamba_jax.train.additions`) into the engine.

        Raises:
            RequestError: unfinished requests use the engine's only adapter entry.
        """
        self.write(self._directory, values)
        self._llm.load_lora_adapter(self.lora_request.lora_name, self.lora_request.lora_path)

    def write(self, directory: Path, values: Mapping[str, Array]) -> None:
        """Writes the adapter among `values` as PEFT does."""
        write_adapter(directory, adapter_modules(values), self._llm.model.config, alpha=self._alpha, base=self._base)


def improve(
    update: UpdateEngine,
    trainer: PolicyTrainer,
    rollouts: Rollouts,
    prompts: Sequence[Prompt],
    *,
    steps: int,
    prompts_per_step: int,
    seed: int = 0,
    progress: Callable[[TrainingRound], None] = lambda _: None,
) -> list[TrainingRound]:
    """Trains with GRPO: each step samples answers to some prompts, trains on them, and updates the engine.

    `update` gets all of `trainer`'s weights. Their versions have the names of the steps.

    Raises:
        ValueError: the trainer is schedule-invariant, and the engine has other bits because it runs on several devices.
    """
    shards, members = (getattr(rollouts.llm.config, f"{name}_parallel_size") for name in ("tensor", "context"))
    if trainer.schedule_invariant and shards * members > 1:
        raise ValueError(f"schedule_invariant: the engine runs on {shards * members} devices: use one")
    rng, rounds = np.random.default_rng(seed), []
    for step in range(steps):
        chosen = rng.choice(len(prompts), min(prompts_per_step, len(prompts)), replace=False)
        answers, reward = rollouts.sample([prompts[i] for i in chosen], seed=int(rng.integers(2**31)))
        figures = trainer.step(answers)
        update(trainer.values, f"step {step + 1}")
        rounds.append(TrainingRound(step, reward, figures))
        progress(rounds[-1])
    return rounds


def own_text(
    model: Path, streams: Mapping[str, TokenStream], shares: Mapping[str, float], *, tokens: int, seed: int
) -> TokenStream:
    """Returns pieces of text, each with the model's greedy continuation.

    Args:
        model: the model's directory.
        streams: text by source.
        shares: weight of each source; the sum may differ from 1.
        tokens: minimum number of tokens of all continuations.
        seed: seed for the choice of pieces.
    """
    rng, names = np.random.default_rng(seed), sorted(shares)
    chances = np.array([shares[name] for name in names]) / sum(shares.values())
    llm = LLM(
        str(model), max_num_seqs=32, max_model_len=MOST_PROMPT + CONTINUATION, mamba_cache_mode="none", warmup=False
    )
    params = SamplingParams(max_tokens=CONTINUATION, temperature=0.0)
    texts: list[list[int]] = []
    made = 0
    while made < tokens:
        prompts = []
        for _ in range(min(256, -(-(tokens - made) // CONTINUATION))):
            text = streams[names[rng.choice(len(names), p=chances)]].tokens
            end = int(rng.integers(LEAST_PROMPT, min(MOST_PROMPT, len(text)) + 1))
            start = int(rng.integers(len(text) - end + 1))
            prompts.append({"prompt_token_ids": text[start : start + end].tolist()})
        outputs = llm.generate(prompts, params)
        texts += [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        made += sum(len(output.outputs[0].token_ids) for output in outputs)
    return TokenStream.of(texts)
