"""The losses, and that drafts are trained on just what they see when serving; and the auxiliary loss that spreads
tokens evenly over experts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mamba_jax.layout import SequenceLayout
from mamba_jax.modules.feed_forward import Router, balance_loss
from mamba_jax.train.config import DraftSettings
from mamba_jax.train.head_loss import distillation, mean_cross_entropy
from mamba_jax.train.loop import initial_values
from mamba_jax.train.loss import build, rollout, training_loss
from tests.support.models.tiny_configs import EVERYTHING, MOE
from tests.support.models.tiny_training import CONFIG, NO_DRAFTS, batches
from tests.support.stored_jit import StoredJit, late


@StoredJit
def large_values():
    """Larger than a fresh model's, so that nothing is lost in rounding."""
    values = initial_values(CONFIG, 1)
    return {path: v * 8 if v.ndim > 1 and ".conv_" not in path else v for path, v in values.items()}


VALUES = large_values()
TOKENS = jnp.asarray(batches()[0][:2, :13])
MODEL = build(CONFIG, VALUES, jnp.float32)


@late
def hidden_of(tokens):
    flat, _ = MODEL.run(tokens.reshape(-1), SequenceLayout.of(*tokens.shape), None)
    return flat.reshape(*tokens.shape, -1)


@late
def draft(tokens, before):
    """Positions past those that count hold anything: everything is causal."""
    return MODEL.draft(tokens, before, SequenceLayout.of(1, tokens.shape[0]), None)[0]


def test_drafts_see_what_they_see_when_serving():
    tokens, depth = TOKENS[:1], 3
    passes = jax.jit(lambda tokens, hidden: rollout(MODEL, tokens, hidden, depth))(tokens, hidden_of(tokens))
    hidden = np.asarray(hidden_of(tokens)[0])
    for last in (1, 4, 9):  # the first draft follows this token, whose predecessor is the last that the model has seen
        before = np.zeros_like(hidden)
        before[1 : last + 1] = hidden[:last]
        for n in range(depth):
            place = last + n
            out = np.asarray(draft(tokens[0], before))
            np.testing.assert_allclose(passes[n][0, place], out[place], rtol=1e-4, atol=1e-5)
            before[place + 1] = out[place]


@pytest.mark.full
def test_parts_are_what_they_are_called():
    drafts = DraftSettings(depth_weights=(0.5, 0.25))
    loss = functools.partial(training_loss, config=CONFIG, drafts=drafts, dtype=jnp.float32)
    total, parts = jax.jit(loss)(VALUES, TOKENS)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    hidden = hidden_of(inputs)
    nll = optax.softmax_cross_entropy_with_integer_labels(MODEL.logits(hidden), targets)
    np.testing.assert_allclose(parts["loss"], nll.mean(), rtol=1e-5)
    for n, state in enumerate(jax.jit(lambda: rollout(MODEL, inputs, hidden, 2))()):
        nll = optax.softmax_cross_entropy_with_integer_labels(MODEL.logits(state), targets)[:, n + 1 :]
        np.testing.assert_allclose(parts[f"draft_loss_{n + 1}"], nll.mean(), rtol=1e-5)
    expected = parts["loss"] + 0.5 * parts["draft_loss_1"] + 0.25 * parts["draft_loss_2"]
    np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("targets", ["data", "model"])
def test_detached_drafts_leave_the_model_alone(targets):
    def gradient(**options):
        loss = functools.partial(training_loss, config=CONFIG, dtype=jnp.float32, drafts=DraftSettings(**options))
        return jax.jit(jax.grad(lambda values: loss(values, TOKENS)[0]))(VALUES)

    alone = gradient(depth_weights=())
    detached = gradient(depth_weights=(1.0, 1.0), targets=targets, detach=True)
    joint = gradient(depth_weights=(1.0, 1.0), targets=targets)
    for path in VALUES:
        if path.startswith("mtp."):
            assert np.abs(detached[path]).max() > 0, path
            assert np.isfinite(detached[path]).all()
        else:
            np.testing.assert_allclose(detached[path], alone[path], rtol=1e-4, atol=1e-6)
    assert np.abs(joint["embed.weight"] - alone["embed.weight"]).max() > 1e-4


@pytest.mark.parametrize(("batch", "length"), [(3, 7), (1, 300)])
def test_the_head_in_pieces(batch, length):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = 3 * jax.random.normal(keys[0], (batch, length, 16))
    weight, targets = jax.random.normal(keys[1], (50, 16)), jax.random.randint(keys[2], (batch, length), 0, 50)

    def whole(hidden, weight):
        return optax.softmax_cross_entropy_with_integer_labels(0.7 * hidden @ weight.T, targets).mean()

    forms = whole, lambda hidden, weight: mean_cross_entropy(hidden, weight, targets, 0.7)
    expected, got = (jax.jit(jax.value_and_grad(form, (0, 1)))(hidden, weight) for form in forms)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_drafts_in_pieces():
    keys = jax.random.split(jax.random.key(1), 3)
    drafting, hidden = jax.random.normal(keys[0], (3, 2, 12, 16)), jax.random.normal(keys[1], (2, 12, 16))
    weight, depths = jax.random.normal(keys[2], (50, 16)), jnp.asarray([1.0, 0.5, 2.0])

    def whole(drafting):
        guide = 0.7 * hidden @ weight.T
        losses, agreements = [], []
        for n in range(3):
            logits = 0.7 * drafting[n, :, n + 1 :] @ weight.T
            losses.append(optax.softmax_cross_entropy(logits, jax.nn.softmax(guide[:, n + 1 :])).mean())
            agreements.append((logits.argmax(-1) == guide[:, n + 1 :].argmax(-1)).mean())
        return (depths * jnp.stack(losses)).sum(), jnp.stack(agreements)

    def pieces(drafting):
        losses, agreements = distillation(drafting, hidden, weight, 0.7)
        return (depths * losses).sum(), agreements

    (expected, agreed), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True))(drafting)
    (got, agrees), got_gradient = jax.jit(jax.value_and_grad(pieces, has_aux=True))(drafting)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(agrees, agreed, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(pieces)(drafting)[0], expected, rtol=1e-5)


@pytest.mark.full
def test_rematerialized_sublayers_keep_less_and_give_the_same_gradient():
    tokens = jnp.tile(TOKENS, (2, 12))

    def loss(values, rematerialize):
        how = {"config": CONFIG, "drafts": NO_DRAFTS, "dtype": jnp.float32}
        return training_loss(values, tokens, **how, rematerialize=rematerialize)[0]

    def kept(rematerialize):
        """Bytes that the backward pass reads."""
        backward = jax.eval_shape(lambda values: jax.vjp(lambda v: loss(v, rematerialize), values)[1], VALUES)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    weights = sum(value.nbytes for value in VALUES.values())
    assert kept(True) - weights < 0.5 * (kept(False) - weights), (kept(True), kept(False), weights)
    expected, got = (jax.jit(jax.grad(functools.partial(loss, rematerialize=one)))(VALUES) for one in (False, True))
    for path, value in got.items():
        atol = 1e-5 * float(np.abs(expected[path]).max() + 1)
        np.testing.assert_allclose(value, expected[path], rtol=1e-3, atol=atol, err_msg=path)


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

        @jax.jit
        def step(router):
            # The weights themselves are no loss: only what the router adds to their gradient moves it.
            gradient = nnx.grad(lambda router: 0.0 * choice_of(router).weights.sum())(router)
            router.weight[...] -= gradient.weight[...]
            return router

        for _ in range(100):
            router = step(router)
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
        how = {"config": EVERYTHING, "drafts": NO_DRAFTS, "dtype": jnp.float32}
        return training_loss(values, tokens, **how, balance_experts=balance)[0]

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
