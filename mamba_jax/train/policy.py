"""Reinforcement learning by GRPO (Shao et al., 2024), which compares several answers to each prompt.

The answers come from an engine that serves the same weights. The trainer uses the log-probabilities that the engine
reports, so that training corrects for any difference between the two. The last part is a verifiable reward: whether a
text states a result, and whether its calculations are right.
"""

import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.config import HybridConfig
from mamba_jax.sequences import checked_sequences
from mamba_jax.train.additions import divide
from mamba_jax.train.loss import Parameters, build
from mamba_jax.train.score import SCORE_OPTIONS, check_score, score, sequence_logprobs

_EPSILON = 1e-4
"""Added to a group's standard deviation, so that nearly equal rewards have no effect."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Answers:
    """Sampled sequences with their advantages."""

    tokens: Int[Array, "batch length"]
    """Prompt and answer, then padding."""
    lengths: Int[Array, " batch"]
    answered: Bool[Array, "batch length_1"]
    """Positions whose next token belongs to the answer."""
    logprobs: Float[Array, "batch length_1"]
    """Log-probability of the next token at each position, as reported by the engine (at temperature 1)."""
    advantages: Float[Array, " batch"]


def group_advantages(rewards: Float[Array, "prompts samples"]) -> Float[Array, "prompts samples"]:
    """Difference of each reward to the mean of its prompt's answers, in their standard deviations."""
    mean, deviation = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, keepdims=True)
    return (rewards - mean) / (deviation + _EPSILON)


def policy_loss(
    values: Parameters,
    answers: Answers,
    *,
    config: HybridConfig,
    dtype: DTypeLike,
    clip: float,
    schedule_invariant: bool = False,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the clipped surrogate objective, a mean over the answers' tokens.

    Args:
        values: float32 weights, and the adapter that is trained, if any (see `mamba_jax.train.additions`).
        answers: answers with advantages; their weights may be a few steps older.
        config: the model's configuration.
        dtype: dtype of the products.
        clip: distance from 1 at which the ratio of new to old probability is clipped.
        schedule_invariant: compute log-probabilities with the bits of an engine on one device with that flag
            (`score`). The program must be compiled with `SCORE_OPTIONS`.
    Returns:
        The loss; `kl`, the divergence between the distribution that the answers were drawn from and that of these
        weights (per token, by the estimator of Schulman, 2020); and `clipped`, the share of tokens that are clipped.
    """
    values, added = divide(values)
    model = build(config, values, dtype)
    compute = score if schedule_invariant else sequence_logprobs
    difference = compute(model, answers.tokens, answers.lengths, added) - answers.logprobs
    difference = jnp.where(answers.answered, difference, 0.0)
    ratio, advantage = jnp.exp(difference), answers.advantages[:, None]
    bounded = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * advantage, bounded * advantage)
    count = jnp.maximum(answers.answered.sum(), 1)

    def mean(x: Array) -> Array:
        return jnp.where(answers.answered, x, 0.0).sum() / count

    lost = jnp.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)
    parts = {"kl": mean(jnp.expm1(difference) - difference), "clipped": mean(lost.astype(jnp.float32))}
    return -mean(gain), parts


class PolicyTrainer:
    """Trains one model, or an adapter of it, step by step.

    Trained weights and optimizer state are donated: read `values` again after each step.

    Args:
        config: the model's configuration.
        values: weights by dotted path, and an adapter (see `mamba_jax.train.additions`). Trained ones are copied; the
            others are used as they are, and do not change.
        optimizer: optimizer of the trained weights.
        trained: predicate on dotted paths that selects the trained weights.
        dtype: dtype of the products.
        clip: see `policy_loss`.
        schedule_invariant: see `policy_loss`.

    Raises:
        ValueError: `schedule_invariant` where `score` is not supported.
    """

    def __init__(
        self,
        config: HybridConfig,
        values: Parameters,
        optimizer: optax.GradientTransformation,
        *,
        trained: Callable[[str], bool] = lambda path: True,
        dtype: DTypeLike = jnp.float32,
        clip: float = 0.2,
        schedule_invariant: bool = False,
    ) -> None:
        if schedule_invariant:
            check_score(config)
        self.schedule_invariant = schedule_invariant
        self._own = {path: jnp.array(value, jnp.float32, copy=True) for path, value in values.items() if trained(path)}
        self._frozen = {path: value for path, value in values.items() if not trained(path)}
        self._moments, self._config = optimizer.init(self._own), config

        options = SCORE_OPTIONS if schedule_invariant else None

        @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=options)
        def update(own: Parameters, moments: Any, frozen: Parameters, answers: Answers) -> Any:
            def loss(values: Parameters) -> tuple[Array, dict[str, Array]]:
                return policy_loss(
                    {**frozen, **values}, answers, config=config, dtype=dtype, clip=clip,
                    schedule_invariant=schedule_invariant,
                )  # fmt: skip

            (_, parts), gradient = jax.value_and_grad(loss, has_aux=True)(own)
            changes, moments = optimizer.update(gradient, moments, own)
            parts["gradient_norm"] = optax.global_norm(gradient)
            return optax.apply_updates(own, changes), moments, parts

        self._update = update

    @property
    def values(self) -> Parameters:
        """The current weights, trained or not; the next step donates the trained ones."""
        return {**self._frozen, **self._own}

    def step(self, answers: Answers) -> dict[str, float]:
        """Runs one step of the optimizer and returns its figures (see `policy_loss`).

        Raises:
            TypeError, ValueError: the answers' tokens or lengths are wrong, as for `HybridModel.hidden`.
        """
        checked_sequences(self._config, answers.tokens, answers.lengths)
        self._own, self._moments, parts = self._update(self._own, self._moments, self._frozen, answers)
        return {name: float(value) for name, value in parts.items()}


_NUMBER = r"\d+(?:\.\d+)?"
_EQUATION = re.compile(rf"(?<![\d.])({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*=\s*\$?({_NUMBER})(?![\d.]*\d)")
_DO = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_RESULT = re.compile(r"####\s*-?\d")
LEAST_EQUATIONS = 2
"""Equations that a text lacks count as wrong."""
FOR_RESULT = 0.25
"""Reward for stating any result; the rest is for right equations."""


def equations(text: str) -> dict[str, bool]:
    """Returns each distinct `a + b = c` of a text (also with - * /), and whether it is right."""
    return {match[0]: _is_right(*match.groups()) for match in _EQUATION.finditer(text)}


def arithmetic_reward(text: str) -> float:
    """From 0 to 1: `FOR_RESULT` for a line `#### number`, the rest in proportion to the text's right equations."""
    found = equations(text).values()
    share = sum(found) / max(len(found), LEAST_EQUATIONS)
    return FOR_RESULT * bool(_RESULT.search(text)) + (1 - FOR_RESULT) * share


def _is_right(left: str, sign: str, right: str, result: str) -> bool:
    a, b = float(left), float(right)
    return (sign, b) != ("/", 0) and math.isclose(_DO[sign](a, b), float(result), rel_tol=0, abs_tol=0.005)
