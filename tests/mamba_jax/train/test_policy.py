"""GRPO: advantages, the loss and its gradient, by hand; and a reward that sees through wrong sums."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kernels_pallas import native
from mamba_jax.train.loop import initial_values
from mamba_jax.train.loss import build
from mamba_jax.train.policy import Answers, PolicyTrainer, arithmetic_reward, equations, group_advantages, policy_loss
from mamba_jax.train.score import score, sequence_logprobs
from tests.support.models.tiny_training import CONFIG
from tests.support.stored_jit import late

scored = late(sequence_logprobs)
loss_of = late(partial(policy_loss, config=CONFIG, dtype=jnp.float32, clip=0.2))


@pytest.fixture(scope="module")
def values():
    return {path: 3 * value if value.ndim > 1 else value for path, value in initial_values(CONFIG, 1).items()}


def answers(values, **changes):
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(0, 40, (2, 9)).astype(np.int32), np.array([9, 6], np.int32)
    answered = np.arange(8) >= 3
    answered = np.stack([answered, answered & (np.arange(8) < 5)])
    now = scored(build(CONFIG, values, jnp.float32), jnp.asarray(tokens), jnp.asarray(lengths))
    made = {"tokens": tokens, "lengths": lengths, "answered": answered, "logprobs": np.asarray(now)}
    return Answers(**jax.tree.map(jnp.asarray, made | {"advantages": np.array([1.0, -1.0], np.float32)} | changes))


def test_advantages_compare_within_a_group():
    found = group_advantages(jnp.array([[1.0, 0.0], [0.5, 0.5]]))
    np.testing.assert_allclose(found, [[1, -1], [0, 0]], atol=1e-3)


def test_the_loss_by_hand(values):
    given = answers(values)
    loss, parts = loss_of(values, given)
    # All ratios are 1: the mean advantage of seven tokens, five of the first answer and two of the second.
    np.testing.assert_allclose(loss, -(5 - 2) / 7, atol=1e-5)
    assert abs(parts["kl"]) < 1e-9
    far = answers(values, logprobs=given.logprobs - 1.0)  # the answers have become e times as likely
    loss, parts = loss_of(values, far)
    np.testing.assert_allclose(loss, -(5 * 1.2 - 2 * np.e) / 7, rtol=1e-4)
    np.testing.assert_allclose((parts["kl"], parts["clipped"]), (np.e - 2, 5 / 7), rtol=1e-4)


def test_a_platform_without_these_bits_is_refused_before_anything_is_traced(values, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match="score is not supported on TPU, only on CPU"):
        PolicyTrainer(CONFIG, values, optax.sgd(0.05), schedule_invariant=True)


@pytest.mark.smoke
def test_what_was_good_becomes_likelier(values):
    trainer = PolicyTrainer(CONFIG, values, optax.sgd(0.05))
    given = answers(values)
    figures = trainer.step(given)
    assert figures["gradient_norm"] > 0
    after = scored(build(CONFIG, trainer.values, jnp.float32), given.tokens, given.lengths)
    change = jnp.where(given.answered, after - given.logprobs, 0).sum(axis=1)
    assert change[0] > 0 > change[1]
    assert all(not value.is_deleted() for value in values.values())
    with pytest.raises(ValueError, match=rf"tokens\[0, 0\] is {CONFIG.vocab_size}: expected ids"):
        trainer.step(dataclasses.replace(given, tokens=given.tokens.at[0, 0].set(CONFIG.vocab_size)))


def test_sums_are_checked():
    assert equations("16*3=48 ounces, then 48 * 8 = 385 and 10/4=2.5") == {
        "16*3=48": True, "48 * 8 = 385": False, "10/4=2.5": True,
    }  # fmt: skip
    assert arithmetic_reward("1+1=2") == 0.375
    assert arithmetic_reward("1+1=2 1+1=2 3-1=2\n#### 2") == 1
    assert arithmetic_reward("1+1=2 1+2=4 1+3=4 1+4=6 #### 6") == 0.25 + 0.75 / 2
    assert arithmetic_reward("5/0=1 and no sums 12=12") == 0
    assert arithmetic_reward("#### nothing") == 0


@pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")
def test_a_score_has_the_gradient_of_the_ordinary_form(values):
    given, model = answers(values), build(CONFIG, values, jnp.float32)

    def gradient(function):
        def loss(values):
            found = function(build(CONFIG, values, jnp.float32), given.tokens, given.lengths)
            return jnp.where(given.answered, found, 0).sum()

        return jax.jit(jax.grad(loss))(values)

    ordinary = scored(model, given.tokens, given.lengths)
    np.testing.assert_allclose(score(model, given.tokens, given.lengths), ordinary, atol=1e-5)
    found, expected = gradient(score), gradient(sequence_logprobs)
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path])
