"""Reinforcement learning with rollouts by the engine, in one process: sample, reward, learn, update the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from mamba_jax.train.policy import Answers, PolicyTrainer, group_advantages
from serving.engine.llm import LLM
from serving.engine.output import CompletionOutput, RequestOutput
from serving.engine.sampling_params import SamplingParams

Reward = Callable[[CompletionOutput], float]
Prompt = dict[str, list[int]]


@dataclass(frozen=True)
class Round:
    """What one step of a run was made of, and what came of it."""

    step: int
    reward: float
    """Mean over all answers."""
    figures: dict[str, float]
    """Of the trainer."""


class Rollouts:
    """Samples answers from an engine, and makes of them what a trainer learns from.

    Args:
        llm: any; its draft source, cache mode and mesh make no difference to what is learnt.
        reward: of an answer.
        samples: answers to each prompt, which share its prefill.
        max_tokens: of an answer.
        length: of prompt and answer together: what all sequences are padded to.
    """

    def __init__(self, llm: LLM, reward: Reward, *, samples: int, max_tokens: int, length: int) -> None:
        self._llm, self._reward = llm, reward
        self._samples, self._max_tokens, self._length = samples, max_tokens, length

    def sample(self, prompts: Sequence[Prompt], seed: int) -> tuple[Answers, float]:
        """Answers to all prompts, and their mean reward.

        Raises:
            RequestError: a prompt that is too long.
        """
        params = [
            SamplingParams(n=self._samples, temperature=1.0, max_tokens=self._max_tokens, seed=seed + i, logprobs=0)
            for i in range(len(prompts))
        ]
        outputs = self._llm.generate(list(prompts), params, use_tqdm=False)
        rewards = np.array([[self._reward(choice) for choice in output.outputs] for output in outputs])
        advantages = np.asarray(group_advantages(jnp.asarray(rewards, jnp.float32)))
        return self._answers(outputs, advantages.reshape(-1)), float(rewards.mean())

    def mean_reward(self, prompts: Sequence[Prompt], seed: int) -> float:
        """Of answers that nothing is learnt from."""
        return self.sample(prompts, seed)[1]

    def _answers(self, outputs: Sequence[RequestOutput], advantages: np.ndarray) -> Answers:
        pairs = [(output.prompt_token_ids, choice) for output in outputs for choice in output.outputs]
        tokens = np.zeros((len(pairs), self._length), np.int32)
        lengths = np.zeros(len(pairs), np.int32)
        answered = np.zeros((len(pairs), self._length - 1), bool)
        logprobs = np.zeros((len(pairs), self._length - 1), np.float32)
        for row, (prompt, choice) in enumerate(pairs):
            end = len(prompt) + len(choice.token_ids)
            tokens[row, :end] = [*prompt, *choice.token_ids]
            lengths[row] = end
            answered[row, len(prompt) - 1 : end - 1] = True
            logprobs[row, len(prompt) - 1 : end - 1] = _drawn(choice)
        return Answers(*map(jnp.asarray, (tokens, lengths, answered, logprobs, advantages)))


def improve(
    llm: LLM,
    trainer: PolicyTrainer,
    rollouts: Rollouts,
    prompts: Sequence[Prompt],
    *,
    steps: int,
    prompts_per_step: int,
    seed: int = 0,
    progress: Callable[[Round], None] = lambda _: None,
) -> list[Round]:
    """GRPO: each step samples answers to some of the prompts, learns from them, and gives the engine the new weights.

    The engine's weights become `trainer`'s; versions of the weights are numbered by steps.
    """
    rng, rounds = np.random.default_rng(seed), []
    for step in range(steps):
        chosen = rng.choice(len(prompts), min(prompts_per_step, len(prompts)), replace=False)
        answers, reward = rollouts.sample([prompts[i] for i in chosen], seed=int(rng.integers(2**31)))
        figures = trainer.step(answers)
        llm.update_weights(trainer.values, version=f"step {step + 1}")
        rounds.append(Round(step, reward, figures))
        progress(rounds[-1])
    return rounds


def _drawn(choice: CompletionOutput) -> list[float]:
    """Log-probabilities that the tokens of an answer were drawn by."""
    assert choice.logprobs is not None
    return [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]
