"""States that wait in fewer bits: what becomes of their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.rounding import NarrowDtype

KINDS = ("bfloat16", "float16", "int8")
GENERATOR = np.random.default_rng(0)
SIZES = np.exp(GENERATOR.normal(0, 3, (2, 5, 7, 1)))
"""Heads and channels differ by orders of magnitude."""
STATE = (GENERATOR.normal(size=(2, 5, 7, 16)) * SIZES).astype(np.float32)


def there_and_back(kind, state):
    narrow = NarrowDtype(kind)
    return np.asarray(jax.jit(lambda x: narrow.widened("ssm", narrow.parts("ssm", x)))(state))


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_row_rounds_to_what_comes_back(kind):
    """Compiled as one program too, where a compiler may leave out conversions there and back."""
    rounded, back = np.asarray(jax.jit(NarrowDtype(kind).rounded)(STATE)), there_and_back(kind, STATE)
    np.testing.assert_array_equal(rounded, back)
    np.testing.assert_array_equal(there_and_back(kind, back), back)  # rounding twice changes nothing
    assert (rounded != STATE).mean() > 0.9
    parts = NarrowDtype(kind).parts("ssm", STATE)
    assert sum(part.nbytes for part in parts.values()) == NarrowDtype(kind).bytes(STATE.shape)


@pytest.mark.parametrize(("kind", "bound"), [("bfloat16", 2**-8), ("float16", 2**-10)])
def test_floats_keep_their_own_size(kind, bound):
    assert np.all(np.abs(there_and_back(kind, STATE) - STATE) <= bound * np.abs(STATE) + float(jnp.finfo(kind).tiny))


def test_int8_is_as_fine_as_each_channel_asks():
    largest = np.abs(STATE).max(axis=-1, keepdims=True)
    # Half a step; and the largest number may be cut by what its scale was rounded down by.
    assert np.all(np.abs(there_and_back("int8", STATE) - STATE) <= largest * (0.5 / 127 + 2**-8))
    parts = NarrowDtype("int8").parts("ssm", STATE)
    assert {name: (part.shape, str(part.dtype)) for name, part in parts.items()} == {
        "ssm": (STATE.shape, "int8"),
        "ssm_scale": (STATE.shape[:-1], "bfloat16"),
    }
    assert tuple(parts) == NarrowDtype("int8").names("ssm")


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_large_numbers_finite_and_others_not(kind):
    state = jnp.zeros((4, 8)).at[1, 2].set(1e6).at[2, 3].set(-1e30).at[3, 3].set(jnp.nan)
    back = there_and_back(kind, state)
    assert np.isfinite(back[:3]).all()
    assert not back[0].any()
    assert back[1, 2] == pytest.approx(65504 if kind == "float16" else 1e6, rel=0.01)
    assert not np.isfinite(back[3]).all()
