"""`model(tokens, lengths)`: what it takes, and what it says about the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.random_models import random_model
from tests.support.tiny_configs import EVERYTHING

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
        (TOKENS, jnp.array([-1, 3]), ValueError, "expected numbers from 0 to 3"),
        (TOKENS, 3, TypeError, "lengths is a int"),
    ],
)
def test_wrong_arguments_are_said(tokens, lengths, kind, message):
    with pytest.raises(kind, match=message):
        random_model(EVERYTHING)(tokens, lengths)


def test_numpy_batches_within_jit():
    model = random_model(EVERYTHING)
    lengths = np.array([3, 2], np.int32)
    closed = jax.jit(lambda: model(TOKENS, lengths))()
    given = jax.jit(lambda tokens, lengths: model(tokens, lengths))(TOKENS, lengths)
    np.testing.assert_allclose(closed, given, atol=1e-5)
