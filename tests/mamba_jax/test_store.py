"""The store's arrays and their bytes. States that wait in fewer bits: what becomes of their numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.config import AttentionConfig, HybridConfig, MambaConfig
from mamba_jax.rounding import NarrowDtype
from mamba_jax.store import StoreShape, init_store, store_bytes

CONFIG = HybridConfig(
    family="test", vocab_size=8, hidden_size=24, pattern="M*MM*", norm_eps=1e-5,
    mamba=MambaConfig(num_heads=6, head_dim=8, state_size=16, num_groups=2, conv_width=4),
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, input_size=24),
)  # fmt: skip
HYBRID = StoreShape.of(CONFIG)
NO_ATTENTION = StoreShape.of(dataclasses.replace(CONFIG, pattern="MMM"))


@pytest.mark.parametrize("shape", [HYBRID, NO_ATTENTION])
@pytest.mark.parametrize("debug_state", [False, True])
def test_bytes_are_accounted_for(shape, debug_state):
    types = {"dtype": jnp.bfloat16, "ssm_dtype": jnp.float32}
    store = init_store(shape, num_slots=5, num_pages=7, page_size=4, debug_state=debug_state, **types)
    assert store_bytes(store) == sum(leaf.nbytes for leaf in jax.tree.leaves(store))
    slots = 5 * shape.bytes_per_slot(jnp.bfloat16, debug_state=debug_state)
    assert store_bytes(store) == slots + 7 * shape.bytes_per_page(4, jnp.bfloat16)
    assert store.num_slots == 5
    assert (store.num_pages, store.page_size) == ((7, 4) if shape is HYBRID else (0, 0))


def test_one_array_per_layer():
    store = init_store(HYBRID, num_slots=5, num_pages=7, page_size=4, dtype=jnp.float32)
    for name, shape in {"ssm": (5, 6, 8, 16), "conv_x": (5, 3, 48), "conv_bc": (5, 3, 64)}.items():
        assert [slots[name].shape for slots in store.slots] == [shape] * 3
    assert [kv.shape for kv in store.kv] == [(7, 4, 4, 8)] * 2
    assert store.hidden.shape == (5, 24)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(store)]
    assert len(set(buffers)) == len(buffers)  # or donating the store would alias two outputs


def test_the_null_slot_and_page_are_not_enough():
    for slots, pages, message in ((1, 7, "num_slots is 1"), (2, 1, "1 pages of 4")):
        with pytest.raises(ValueError, match=message):
            init_store(HYBRID, num_slots=slots, num_pages=pages, page_size=4, dtype=jnp.float32)
    init_store(NO_ATTENTION, num_slots=2, num_pages=0, page_size=4, dtype=jnp.float32)


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
