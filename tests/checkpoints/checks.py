"""What most tests of checkpoints do: load a model, compare its weights, and read the message of an error."""

import numpy as np
import pytest

import checkpoints
from checkpoints import CheckpointError
from mamba_jax.model import parameters


def load(ref, **options):
    """A model, without a bar."""
    return checkpoints.load_model(ref, progress=False, **options)


def values(model):
    """Its weights by dotted path."""
    return {path: np.asarray(leaf.get_value()) for path, leaf in parameters(model).items()}


def assert_equal(one, other):
    """All weights of one are those of the other, and have their dtypes."""
    assert one.keys() == other.keys()
    for path, value in one.items():
        assert value.dtype == other[path].dtype, path
        np.testing.assert_array_equal(value, other[path], err_msg=path)


def message(action, *arguments, **options):
    """The message of the error that a call raises: one line that a person reads."""
    with pytest.raises(CheckpointError) as error:
        action(*arguments, **options)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text
