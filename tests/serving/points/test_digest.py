"""The digest of arrays depends on every value and its position, and not on how they are divided."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax.model import parameters
from serving.points.digest import array_digest, model_digest
from tests.support.fleets.split_pair import CONFIG, model

DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "bool", "float8_e4m3fn", "int4", "float4_e2m1fn"]


def digest(values) -> bytes:
    return np.asarray(array_digest(jnp.asarray(values))).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_counts(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = (np.arange(35) % 2).astype(kind).reshape(5, 7)
    seen = {digest(values)}
    for at in range(values.size):
        changed = values.copy()
        changed.reshape(-1)[at] = 1 - at % 2
        seen.add(digest(changed))
    assert len(seen) == 36


def test_positions_count():
    values = np.arange(40, dtype=np.float32)
    exchanged = values.copy()
    exchanged[[3, 30]] = values[[30, 3]]
    assert len({digest(each) for each in (values, exchanged, values[::-1], np.roll(values, 1))}) == 4
    assert digest(-np.zeros(3)) != digest(np.zeros(3))


def test_a_digest_does_not_depend_on_the_devices():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs several devices")
    values = np.random.default_rng(0).standard_normal((8, 6), np.float32)
    for axes in (("x",), (None, "x")):
        place = NamedSharding(Mesh(np.array(devices[:2]), ("x",)), PartitionSpec(*axes))
        assert np.asarray(array_digest(jax.device_put(values, place))).tobytes() == digest(values)


def test_rows_between_those_of_a_sample_count():
    """A fourth of the embedding's rows was once changed without another digest."""
    one, other = model(), model()
    before = model_digest(one, CONFIG)
    assert model_digest(other, CONFIG) == before
    table = parameters(other)["embed.weight"]
    rows = table.get_value()
    sampled = max(1, rows.size // 16)
    changed = np.array(rows).reshape(-1)
    changed[1:sampled] += 1.0
    table.set_value(jnp.asarray(changed.reshape(rows.shape)))
    try:
        assert model_digest(other, CONFIG) != before
    finally:
        table.set_value(rows)
