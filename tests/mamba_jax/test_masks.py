"""Masks of allowed tokens: exactly the tokens whose bit is set, at each head, for the seats that have masks."""

import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.sampling import choose
from mamba_jax.sampling.masks import MaskBatch, apply_masks, init_masks, mask_words, write_masks
from mamba_jax.sampling.table import init_sampling_table
from tests.support.sampling import asked_of

VOCAB, SEATS, HEADS = 70, 4, 3


def bits(allowed: np.ndarray) -> np.ndarray:
    """[..., vocab] bool as words."""
    padded = np.zeros((*allowed.shape[:-1], mask_words(VOCAB) * 32), bool)
    padded[..., :VOCAB] = allowed
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def written(allowed: np.ndarray, seats):
    batch = MaskBatch.empty(rows=4, heads=HEADS, vocab_size=VOCAB)
    for i, seat in enumerate(seats):
        batch.row_id[i], batch.bits[i] = seat, bits(allowed[i])
    return write_masks(init_masks(SEATS + 1, HEADS, VOCAB), batch)


def test_only_masked_seats_change(rng):
    allowed = rng.random((2, HEADS, VOCAB)) < 0.3
    masks = written(allowed, [3, 1])
    assert masks.on.tolist() == [False, True, False, True, False]
    logits = rng.normal(size=(4, HEADS, VOCAB)).astype(np.float32)
    after = np.asarray(apply_masks(jnp.asarray(logits), masks, jnp.array([1, 2, 3, 0])))
    np.testing.assert_array_equal(after[1], logits[1])
    np.testing.assert_array_equal(after[3], logits[3])
    np.testing.assert_array_equal(after[0], np.where(allowed[1], logits[0], -np.inf))
    np.testing.assert_array_equal(after[2], np.where(allowed[0], logits[2], -np.inf))
    one_head = np.asarray(apply_masks(jnp.asarray(logits[:, :1]), masks, jnp.array([1, 2, 3, 0])))
    np.testing.assert_array_equal(one_head, after[:, :1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_allowed_is_never_chosen(rng, temperature):
    """Drafts that are not allowed are rejected, even where the model wants them most."""
    allowed = np.zeros((1, HEADS, VOCAB), bool)
    allowed[0, :, 40:50] = True
    logits = rng.normal(size=(1, HEADS, VOCAB)).astype(np.float32)
    logits[0, 0, 45] = logits[0, 1, 5] = 50.0
    table = init_sampling_table(SEATS + 1)
    table = type(table)(**(vars(table) | {"temperature": jnp.full(SEATS + 1, temperature)}))
    drafts, seat = jnp.array([[45, 5]]), jnp.array([2])
    asked = asked_of(table, logits.shape, drafts=drafts, row_id=seat, masks=written(allowed, [2]))
    emission = choose(jnp.asarray(logits), asked)
    assert emission.accepted.tolist() == [1]
    first, second, third = emission.tokens[0].tolist()
    assert first == 45
    assert 40 <= second < 50
    assert third == -1
