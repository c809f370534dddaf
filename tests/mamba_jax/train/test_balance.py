"""The auxiliary loss that spreads tokens evenly over experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.modules.feed_forward import Router, balance_loss
from mamba_jax.train.config import DraftSettings
from mamba_jax.train.loop import initial_values
from mamba_jax.train.loss import training_loss
from tests.support.models.tiny_configs import EVERYTHING, MOE

X = jax.random.normal(jax.random.key(0), (256, 16)) + 0.5


def choice_of(router):
    return router(X, jnp.ones(len(X), bool), jnp.int32(0), own=router.config.num_experts)


def spread(router):
    """The load of the busiest expert as a multiple of the mean."""
    load = np.bincount(np.asarray(choice_of(router).chosen).reshape(-1), minlength=router.config.num_experts)
    return load.max() / load.mean()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_spread_of_the_load_shrinks(kind):
    def trained(balance):
        config = dataclasses.replace(MOE, num_experts=8, experts_per_token=2, num_groups=1, top_groups=1, router=kind)
        router = Router(dataclasses.replace(config, balance=balance), 16, rngs=nnx.Rngs(0))
        first = jnp.zeros((8, 16)).at[0].set(0.5)  # the first expert is everyone's choice
        router.weight[...] = jax.random.normal(jax.random.key(1), (8, 16)) * 0.1 + first
        before = spread(router)

        @nnx.jit
        def step(router):
            # The weights themselves are no loss: only what the router adds to their gradient moves it.
            gradient = nnx.grad(lambda router: 0.0 * choice_of(router).weights.sum())(router)
            router.weight[...] -= gradient.weight[...]

        for _ in range(100):
            step(router)
        return before, spread(router)

    before, after = trained(1.0)
    assert before > 2
    assert after < 1.5
    before, after = trained(0.0)
    assert after == before


def test_the_loss_is_one_for_an_equal_load():
    shares, chosen = jnp.full((4, 4), 0.25), jnp.array([[0, 1], [2, 3], [0, 1], [2, 3]])
    np.testing.assert_allclose(balance_loss(shares, chosen), 1.0)
    collapsed = jnp.zeros((4, 4)).at[:, 0].set(1.0)
    np.testing.assert_allclose(balance_loss(collapsed, jnp.zeros((4, 1), int)), 4.0)


@pytest.mark.full
def test_the_gradient_of_a_run_contains_it():
    values = initial_values(EVERYTHING, 0)
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, EVERYTHING.vocab_size)

    def loss(values, balance):
        no_drafts = DraftSettings(depth_weights=())
        return training_loss(
            values, tokens, config=EVERYTHING, drafts=no_drafts, dtype=jnp.float32, balance_experts=balance
        )[0]

    without, slightly, fully = (
        jax.jit(jax.value_and_grad(functools.partial(loss, balance=balance)))(values) for balance in (0.0, 0.5, 1.0)
    )
    np.testing.assert_allclose(fully[0], without[0], rtol=1e-6)
    routers = [path for path in values if path.startswith("blocks.") and path.endswith("router.weight")]
    assert routers
    for path in routers:
        half, whole = slightly[1][path] - without[1][path], fully[1][path] - without[1][path]
        assert np.abs(whole).max() > 1e-5, path
        np.testing.assert_allclose(2 * half, whole, rtol=1e-2, atol=1e-6, err_msg=path)
