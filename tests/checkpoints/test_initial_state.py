"""Files of learned initial states: what is written is read, and what does not fit the model is refused by name."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import load_config
from checkpoints.adapters.initial_state import INITIAL_STATE_FILE, read_initial_state, write_initial_state
from mamba_jax.store import StoreShape
from tests.checkpoints.checks import message
from tests.support.models.golden_case import FIXTURES, NAMES
from tests.support.models.random_models import random_layers

BAMBA = load_config(FIXTURES / "bamba")


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_every_family_is_read_as_it_was_written(name, tmp_path):
    config = load_config(FIXTURES / name)
    layers = random_layers(config)
    assert write_initial_state(tmp_path / "tenant", layers, config) == tmp_path / "tenant" / INITIAL_STATE_FILE
    state = read_initial_state(tmp_path / "tenant", config)
    assert state.layers.keys() == layers.keys()
    for index, parts in layers.items():
        for part, value in parts.items():
            np.testing.assert_array_equal(state.layers[index][part], value)
    assert [path.name for path in (tmp_path / "tenant").iterdir()] == [INITIAL_STATE_FILE]
    # The store's arrays hold every number once, in the order of its layers.
    slot = state.slot_arrays(config)
    assert [{n: v.shape for n, v in arrays.items()} for arrays in slot] == [
        {array.name: array.shape for array in arrays} for arrays in StoreShape.of(config).slots[: len(slot)]
    ]
    for arrays, parts in zip(slot, layers.values(), strict=True):
        held = np.concatenate([value.ravel() for value in arrays.values()])
        assert np.array_equal(np.sort(held), np.sort(np.concatenate([value.ravel() for value in parts.values()])))


def test_windows_are_divided_along_the_channels(tmp_path):
    layers = random_layers(BAMBA)
    write_initial_state(tmp_path, layers, BAMBA)
    first, (_, parts) = read_initial_state(tmp_path, BAMBA).slot_arrays(BAMBA)[0], min(layers.items())
    np.testing.assert_array_equal(np.concatenate([first["conv_x"], first["conv_bc"]], axis=1), parts["window"])
    np.testing.assert_array_equal(first["ssm"], parts["state"])
    write_initial_state(tmp_path, {min(layers): {"state": parts["state"]}}, BAMBA)
    first, *others = read_initial_state(tmp_path, BAMBA).slot_arrays(BAMBA)
    assert first["ssm"].any(), "missing tensors are zeros"
    assert not first["conv_x"].any()
    assert not any(value.any() for arrays in others for value in arrays.values())


def test_the_digest_is_that_of_the_content(tmp_path):
    layers = random_layers(BAMBA)
    digests = set()
    for change in (0, 0, 1e-6):
        next(iter(layers.values()))["state"][0] += np.float32(change)
        write_initial_state(tmp_path, layers, BAMBA)
        digests.add(read_initial_state(tmp_path, BAMBA).digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"layers.0.stat": np.zeros(1, np.float32)}, {}, "tensor layers.0.stat is not"),
        ({"layers.99.state": np.zeros(1, np.float32)}, {}, "the model has no layers"),
        ({"layers.0.state": np.zeros(1, np.float32)}, {}, "layers.0.state is [1]: expected"),
        ({"layers.0.state": np.zeros(1, np.float16)}, {}, "layers.0.state is F16: expected F32"),
        ({"layers.0.state": np.nan * random_layers(BAMBA)[0]["state"]}, {}, "not finite"),
        ({}, {"format": "pt"}, "format is 'pt'"),
        ({}, {"version": "2"}, "version is '2': expected '1'"),
        ({}, {"model_type": "lfm2"}, "model_type is 'lfm2'"),
    ],
    ids=["part", "layer", "shape", "dtype", "nan", "format", "version", "family"],
)
def test_what_does_not_fit_is_refused(tensors, metadata, words, tmp_path):
    file = write_initial_state(tmp_path, random_layers(BAMBA), BAMBA)
    sound = {"format": "mamba-jax-initial-state", "version": "1", "model_type": BAMBA.family}
    save_file(load_file(file) | tensors, file, sound | metadata)
    assert words in message(read_initial_state, tmp_path, BAMBA)


def test_a_wrong_state_is_not_written(tmp_path):
    tenant = tmp_path / "tenant"
    for layers, words in (({0: {"stat": np.zeros(1)}}, "the model has no layers.0.stat"), ({}, "has no tensors")):
        assert words in message(write_initial_state, tenant, layers, BAMBA)
    assert not tenant.exists()
    assert "cannot be read" in message(read_initial_state, tmp_path, BAMBA)
