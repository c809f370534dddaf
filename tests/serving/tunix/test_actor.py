"""The model with Tunix's call signature and padding, and the tokenizer with its methods. Needs no Tunix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.families import config_from_hf
from serving.tunix import TunixActor, TunixTokenizer
from tests.support.models.letter_tokens import EOS, ID, letters
from tests.support.models.random_models import random_model
from tests.support.models.tiny_configs import TRAINABLE

CONFIG = config_from_hf(TRAINABLE)
PAD = 0
PROMPTS, ANSWERS = [[5, 9, 2], [7]], [[4], [8, 3, 6]]


def padded():
    """As Tunix pads: prompts on the left to 4, answers on the right to 4."""
    rows = [
        [PAD] * (4 - len(prompt)) + prompt + answer + [PAD] * (4 - len(answer))
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    tokens = jnp.array(rows)
    valid = tokens != PAD
    return tokens, jnp.cumsum(valid, axis=1) - 1, valid[:, None, :] & jnp.tril(jnp.ones((8, 8), bool))


def test_padding_on_both_sides_does_not_change_the_logits_unless_there_is_no_mask():
    model = random_model(CONFIG)
    tokens, positions, mask = padded()
    whole = jax.jit(lambda tokens: model(tokens))
    logits, cache = jax.jit(lambda *padded: TunixActor(model)(*padded))(tokens, positions, None, mask)
    assert cache is None
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        begin, alone = 4 - len(prompt), [*prompt, *answer]
        np.testing.assert_allclose(logits[i, begin : begin + len(alone)], whole(jnp.array([alone]))[0], 2e-4, 2e-5)
    np.testing.assert_array_equal(jax.jit(lambda tokens: TunixActor(model)(tokens)[0])(tokens), whole(tokens))


def test_gradients_reach_the_model_and_are_finite():
    actor = TunixActor(random_model(CONFIG))
    tokens, _, mask = padded()

    def total(actor):
        return jnp.where(mask[:, -1, :, None], actor(tokens, None, None, mask)[0], 0).sum()

    graph, state = nnx.split(actor)
    leaves = jax.tree.leaves(jax.jit(lambda state: nnx.grad(total)(nnx.merge(graph, state)))(state))
    assert all(jnp.isfinite(leaf).all() for leaf in leaves)
    assert any(jnp.abs(leaf).max() > 0 for leaf in leaves)


def test_refuses_a_cache_and_other_masks():
    actor = TunixActor(random_model(CONFIG))
    tokens, positions, mask = padded()
    with pytest.raises(ValueError, match="TunixActor has no cache"):
        actor(tokens, positions, {}, mask)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 8\]: expected \[2, 8, 8\]"):
        actor(tokens, positions, None, mask[:, 0])


def test_tokenizer_pads_with_the_end_where_there_is_no_padding_token():
    tokenizer = letters()
    with pytest.raises(ValueError, match="no eos_token"):
        TunixTokenizer(tokenizer)
    tokenizer.eos_token_id = EOS
    adapted = TunixTokenizer(tokenizer)
    assert (adapted.eos_id(), adapted.pad_id(), adapted.bos_id()) == (EOS, EOS, None)
    assert adapted.decode(adapted.encode("cd")) == "cd"
    tokenizer.pad_token_id = ID["~"]
    assert adapted.pad_id() == ID["~"]
