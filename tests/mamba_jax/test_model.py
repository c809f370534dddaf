"""The whole model on configs that have every kind of sublayer: what must hold whatever the weights are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mamba_jax
from mamba_jax.config import ModelConfigError
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from mamba_jax.train.loss import training_loss
from mamba_jax.train.score import sequence_logprobs
from tests.support.engines.engines import QUICK_COMPILE
from tests.support.models.golden_case import _log_probs as score
from tests.support.models.random_models import random_model
from tests.support.models.tiny_configs import EVERYTHING, SHARED, VOCAB
from tests.support.models.tiny_training import NO_DRAFTS
from tests.support.stored_jit import late

CONFIGS = pytest.mark.parametrize("config", [EVERYTHING, SHARED], ids=["everything", "shared"])
LENGTH = 19


# These programs run once or twice: most of their time would go to making them fast.
QUICK = functools.partial(late, compiler_options=QUICK_COMPILE)


def scorer(config):
    return functools.partial(score, random_model(config))


def tokens_of():
    return np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)


FULL = np.array([LENGTH, LENGTH], np.int32)


@CONFIGS
def test_padding_does_not_matter(config):
    tokens, lengths = tokens_of(), np.array([LENGTH, 7], np.int32)
    padded = tokens.copy()
    padded[1, 7:] = (tokens[1, 7:] + 5) % VOCAB
    unpadded = np.asarray(scorer(config)(tokens, FULL))
    first, second = (np.asarray(scorer(config)(t, lengths)) for t in (tokens, padded))
    np.testing.assert_array_equal(first[1, :7], second[1, :7])
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_allclose(first[1, :7], unpadded[1, :7], atol=1e-5)


@pytest.mark.smoke
@CONFIGS
def test_gradients_reach_every_weight_and_are_finite(config):
    tokens, lengths = tokens_of(), np.array([LENGTH, 7], np.int32)

    def loss(model):
        layout = SequenceLayout.of(*tokens.shape, lengths)
        hidden, _ = model.run(tokens.reshape(-1), layout, None)
        total = jnp.square(jnp.where(layout.valid[:, None], model.logits(hidden), 0)).mean()
        if model.mtp is not None:
            drafts, _ = model.draft(tokens.reshape(-1), jnp.roll(hidden, 1, axis=0), layout, None)
            total += jnp.square(jnp.where(layout.valid[:, None], model.logits(drafts), 0)).mean()
        return total

    # A bias that only chooses experts has no gradient.
    for path, gradient in parameters(QUICK(jax.grad(loss))(random_model(config))).items():
        values = np.asarray(gradient[...])
        assert np.isfinite(values).all(), path
        assert values.any() or path.endswith("correction_bias"), path


def test_drafting_without_the_layer_is_refused():
    with pytest.raises(ValueError, match="no multi-token-prediction layer"):
        HybridModel.abstract(SHARED).draft(jnp.zeros(1, jnp.int32), jnp.zeros((1, 20)), SequenceLayout.of(1, 1), None)


@CONFIGS
def test_bfloat16_is_close(config):
    tokens = tokens_of()
    exact = np.asarray(scorer(config)(tokens, FULL))
    values = parameters(random_model(config))
    targets = parameters(HybridModel.abstract(config, dtype=jnp.bfloat16))
    rounded = {path: values[path][...].astype(target.dtype) for path, target in targets.items()}
    model = HybridModel.from_parameters(config, rounded)
    close = score(model, tokens, FULL)
    assert close.dtype == jnp.float32
    assert (np.exp(exact) * (exact - np.asarray(close))).sum(-1).mean() < 2e-2
    assert {jnp.dtype(t.dtype).name for t in targets.values()} == {"bfloat16", "float32"}


def test_residual_stream_in_float32():
    seen = []

    class Spy(nnx.Module):
        def __init__(self, norm):
            self.weight = norm.weight

        def __call__(self, x):
            seen.append(x.dtype)
            return x.astype(jnp.bfloat16)

    for wide in (True, False):
        config = dataclasses.replace(SHARED, pattern="ZZ", residual_in_fp32=wide)
        model = HybridModel.abstract(config, dtype=jnp.bfloat16)
        model.final_norm = Spy(model.final_norm)
        jax.eval_shape(lambda m: m(jnp.zeros((1, 3), jnp.int32)), model)
    assert seen == [jnp.float32, jnp.bfloat16]


@CONFIGS
def test_parameters_by_path(config):
    model = random_model(config)
    params = parameters(model)
    assert model.num_parameters == sum(p[...].size for p in params.values())
    assert ("lm_head.weight" in params) is not config.tie_word_embeddings
    abstract = parameters(HybridModel.abstract(config))
    assert {k: (v.shape, v.dtype) for k, v in abstract.items()} == {k: (v.shape, v.dtype) for k, v in params.items()}
    again = HybridModel.from_parameters(config, {path: param[...] for path, param in params.items()})
    np.testing.assert_array_equal(score(again, tokens_of(), FULL), scorer(config)(tokens_of(), FULL))


def test_from_parameters_names_what_is_wrong():
    values = {path: param[...] for path, param in parameters(random_model(EVERYTHING)).items()}
    with pytest.raises(ValueError, match=r"final_norm.weight has shape \(3,\), expected \(20,\)"):
        HybridModel.from_parameters(EVERYTHING, {**values, "final_norm.weight": jnp.zeros(3)})
    values["extra"] = values.pop("embed.weight")
    with pytest.raises(ValueError, match=r"missing weights \['embed.weight'\], unknown weights \['extra'\]"):
        HybridModel.from_parameters(EVERYTHING, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp_pattern": "M"}, "layer pattern 'M'"),
        ({"moe": None}, "needs the description of moe"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ModelConfigError, match=message):
        dataclasses.replace(EVERYTHING, **change)


TOKENS = np.arange(6, dtype=np.int32).reshape(2, 3)


@pytest.mark.parametrize(
    ("tokens", "lengths", "kind", "message"),
    [
        ([[1, 2]], None, TypeError, "tokens is a list: expected an array"),
        (TOKENS[0], None, ValueError, r"tokens has shape \[3\]: expected \[batch, length\]; use tokens\[None\]"),
        (TOKENS[None], None, ValueError, r"tokens has shape \[1, 2, 3\]"),
        (TOKENS.astype(float), None, TypeError, "tokens has dtype float64: expected integers"),
        (TOKENS, [3, 3], TypeError, "lengths is a list"),
        (TOKENS, np.array([3]), ValueError, r"lengths has shape \[1\]: expected \[2\], one per sequence"),
        (TOKENS, np.array([3, 4]), ValueError, r"lengths is \[3, 4\]: expected numbers from 0 to 3"),
        (TOKENS + VOCAB - 5, None, ValueError, rf"tokens\[1, 2\] is {VOCAB}: expected ids from 0 to {VOCAB - 1}"),
        (TOKENS - 1, None, ValueError, r"tokens\[0, 0\] is -1: expected ids"),
        (jnp.where(TOKENS == 4, -100, TOKENS), np.array([3, 2]), ValueError, r"tokens\[1, 1\] is -100: expected ids"),
        (TOKENS.astype(np.int64) + 2**32, None, ValueError, rf"tokens\[0, 0\] is {2**32}: expected ids"),
        (TOKENS, jnp.array([-1, 3]), ValueError, "expected numbers from 0 to 3"),
        (TOKENS, 3, TypeError, "lengths is a int"),
    ],
)
def test_wrong_arguments_are_said(tokens, lengths, kind, message):
    model = random_model(EVERYTHING)
    for function in (model, model.hidden, functools.partial(mamba_jax.score, model)):
        with pytest.raises(kind, match=message):
            function(tokens, lengths)


def test_tokens_outside_of_the_vocabulary_are_refused_wherever_they_are_given():
    config = dataclasses.replace(EVERYTHING, pattern="M*")
    model, layout = random_model(config), SequenceLayout.of(1, 3, np.array([2]))
    hidden = jnp.zeros((3, EVERYTHING.hidden_size))
    functions = (
        lambda tokens: model.run(tokens, layout, None),
        lambda tokens: model.draft(tokens, hidden, layout, None),
        lambda tokens: sequence_logprobs(model, tokens[None], np.array([2])),
    )
    for function in functions:
        jax.eval_shape(function, np.array([1, 2, 3]))
        jax.eval_shape(lambda function=function: function(np.array([1, 2, -100])))  # padding of any value
        for wrong in ([VOCAB, 1, 0], [0, -1, 0]):
            with pytest.raises(ValueError, match=rf"is {wrong[0] or -1}: expected ids from 0 to {VOCAB - 1}"):
                function(np.array(wrong))


def test_hidden_states_are_what_logits_are_computed_from():
    model = random_model(EVERYTHING)
    padded = np.where(np.arange(3) < 2, TOKENS, -100)  # padding of any value
    hidden = jax.jit(lambda tokens, lengths: model.hidden(tokens, lengths))(padded, np.array([2, 2]))
    assert hidden.shape == (2, 3, EVERYTHING.hidden_size)
    want = jax.jit(lambda tokens: model(tokens))(TOKENS)
    np.testing.assert_allclose(jax.jit(model.logits)(hidden)[:, :2], want[:, :2], atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (3, 1)])
def test_sequences_may_be_empty(shape):
    model, tokens = random_model(EVERYTHING), np.zeros(shape, np.int32)
    if tokens.size == 0:
        assert model(tokens).shape == (*shape, VOCAB)
        assert model.hidden(tokens).shape == (*shape, EVERYTHING.hidden_size)
        assert model.run(tokens.reshape(-1), SequenceLayout.of(*shape), None)[0].shape == (0, EVERYTHING.step_size)
    assert mamba_jax.score(model, tokens).shape == (shape[0], max(shape[1] - 1, 0))
    values = {path: leaf[...] for path, leaf in parameters(model).items()}
    if shape[0] and shape[1] == 1:  # nothing to predict
        loss, _ = training_loss(values, jnp.asarray(tokens), config=EVERYTHING, drafts=NO_DRAFTS, dtype=jnp.float32)
        assert loss == 0


def test_an_abstract_model_has_its_own_configuration():
    """Digests of weights contain the text of the configuration, in which 1 and 1.0 differ."""
    for multiplier in (1, 1.0):
        config = dataclasses.replace(EVERYTHING, logits_multiplier=multiplier)
        assert repr(HybridModel.abstract(config).config) == repr(config)


def test_numpy_batches_within_jit():
    model = random_model(EVERYTHING)
    lengths = np.array([3, 2], np.int32)
    closed = jax.jit(lambda: model(TOKENS, lengths))()
    given = jax.jit(lambda tokens, lengths: model(tokens, lengths))(TOKENS, lengths)
    np.testing.assert_allclose(closed, given, atol=1e-5)
