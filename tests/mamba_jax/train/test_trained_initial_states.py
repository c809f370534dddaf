"""Initial states that are trained: a whole sequence starts from what a prefill reads from a slot."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.adapters.initial_state import parts_of, read_initial_state, write_initial_state
from mamba_jax.config import ModelConfigError
from mamba_jax.layout import PackedLayout, PrefillLayout, SequenceLayout
from mamba_jax.store import init_store
from mamba_jax.train.additions import attach, initial_states, new_initial_states
from tests.support.models.random_models import random_model
from tests.support.models.tiny_configs import FOR_ENGINES

SLOWER = ("windowed", "kimi", "lightning", "selective")
FAMILIES = ["joined", *(pytest.param(name, marks=pytest.mark.full) for name in SLOWER)]


@pytest.mark.parametrize("name", FAMILIES)
def test_training_starts_from_the_state_that_a_prefill_reads(name, tmp_path):
    # Without attention, a prefill that reads a slot does not depend on positions.
    config = FOR_ENGINES[name]
    config = dataclasses.replace(config, pattern=re.sub("[*LW]", "", config.pattern.replace("P", "M")), mtp_pattern="")
    model, rng = random_model(config), np.random.default_rng(0)
    fresh = new_initial_states(config, windows=True)
    values = jax.tree.map(lambda value: jnp.asarray(rng.normal(size=value.shape), jnp.float32), fresh)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, 2 * 7))
    plain = SequenceLayout.of(2, 7)
    starts = jnp.arange(14) % 7 == 0
    documents = PackedLayout.of_documents(starts, documents=2, longest=8)

    states = jax.tree.map(np.asarray, initial_states(values))
    write_initial_state(tmp_path, {index: parts_of(config, index, arrays) for index, arrays in states.items()}, config)
    store = init_store(config, num_slots=2, num_pages=1, page_size=8, dtype=jnp.float32)
    slots = tuple(
        {name: array.at[1, ..., : own[name].shape[-1]].set(own[name]) for name, array in layer.items()}
        for layer, own in zip(store.slots, read_initial_state(tmp_path, config).slot_arrays(config), strict=True)
    )
    rows = jnp.ones(2, jnp.int32)
    prefill = PrefillLayout.of(
        num_packed=14, tile_size=8, length=8 * rows, num_tokens=7 * rows, read_slot=rows, tile_write_slot=0 * rows,
        page_table=jnp.zeros((2, 2), jnp.int32),
    )  # fmt: skip
    store = dataclasses.replace(store, slots=slots)

    @jax.jit
    def run(model, tokens):
        starting = (attach(model, layout, values) for layout in (plain, documents))
        given = *((layout, None) for layout in (plain, *starting)), (prefill, store)
        return [model.run(tokens, layout, state)[0] for layout, state in given]

    without, found, packed, expected = run(model, tokens)
    assert np.abs(found - without).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_allclose(found, packed, atol=1e-5)


def test_windows_are_trained_only_if_requested():
    config = FOR_ENGINES["nemotronh"]
    assert {path.rpartition(".")[2] for path in new_initial_states(config)} == {"ssm"}
    config = FOR_ENGINES["windowed"]
    with pytest.raises(ModelConfigError, match=r"no recurrent states; train the windows .* \(--windows\)"):
        new_initial_states(config)
    assert {path.rpartition(".")[2] for path in new_initial_states(config, windows=True)} == {"conv"}
