"""Dummy weights that devices repeat are those that the host makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import random as random_weights
from checkpoints.random import PERIOD, DummyParameter, dummy_parameters

SHAPE = (6, 601, 512)


def parameter(dtype, path="blocks.1.mixer.experts.up", shape=SHAPE):
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(PERIOD, np.float32), rng.random(PERIOD, np.float32)
    return DummyParameter(path, shape, dtype, *drawn, False)


@pytest.mark.parametrize("spec", [None, ("model",), (None, None, "model")])
def test_devices_repeat_what_the_host_makes(spec):
    made = parameter(jnp.bfloat16)
    want = made((slice(None),) * 3)
    assert want.size > PERIOD
    sharding = None
    if spec is not None:
        sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), PartitionSpec(*spec))
    found = made.on_devices(sharding)
    assert (found.shape, found.dtype) == (SHAPE, jnp.bfloat16)
    assert sharding is None or found.sharding == sharding
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("path", ["blocks.0.mixer.dt_bias", "blocks.0.mixer.a_log", "blocks.0.norm.weight"])
def test_small_parameters_do_not_repeat(path):
    made = parameter(jnp.float32, path, (24,))
    want = made((slice(None),))
    assert len(np.unique(want)) == 24
    np.testing.assert_array_equal(made.on_devices(None), want)


def test_accelerators_make_their_own_weights(monkeypatch):
    targets = {"blocks.3.mixer.up_proj.weight": jax.ShapeDtypeStruct((3, 5), jnp.float32)}
    want = dummy_parameters(targets)
    monkeypatch.setattr(random_weights, "_platform", lambda sharding: "gpu")
    monkeypatch.setattr(random_weights, "place", lambda *arguments: pytest.fail("the host made a parameter"))
    np.testing.assert_array_equal(
        *(made["blocks.3.mixer.up_proj.weight"] for made in (want, dummy_parameters(targets)))
    )
