"""What is divided over devices, for every published size, and what is refused."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from checkpoints.presets import PRESETS, preset
from mamba_jax.config import WHOLE, ModelConfigError
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.basic import RMSNorm
from mamba_jax.sharding import TENSOR, Partition, make_mesh
from mamba_jax.sharding.across import ShardedModule
from mamba_jax.sharding.parameters import placements
from mamba_jax.store import StoreShape

OF_EVERY_FAMILY = list({(preset(name).family, preset(name).moe is None): name for name in PRESETS}.values())
# All other arrays of a million numbers or more are divided.
MAY_BE_WHOLE = re.compile(r"router|latent_(in|out|proj)|adapters.*\.down|in_proj_bc|[kv]_proj|adapters\.[kv]\.")


def divides(config, shards):
    try:
        return bool(Partition.of(config, shards))
    except ModelConfigError:
        return False


@pytest.mark.parametrize("name", OF_EVERY_FAMILY)
def test_every_parameter_is_declared_and_all_that_is_large_is_divided(name):
    config = preset(name)
    config = dataclasses.replace(config, own_mtp_embedding=bool(config.mtp_pattern))
    shards = next(shards for shards in (8, 4, 2) if divides(config, shards))
    partition, found = Partition.of(config, shards), parameters(HybridModel.abstract(config, dtype=jnp.bfloat16))
    assert placements(config).keys() == found.keys()
    for path, leaf in found.items():
        spec = tuple(partition.parameter(path))
        assert len(spec) <= len(leaf.shape)
        for axis, size in zip(spec, leaf.shape, strict=False):
            assert axis in (None, TENSOR)
            assert axis is None or size % shards == 0, path
        assert TENSOR in spec or leaf.size < 1 << 20 or MAY_BE_WHOLE.search(path), path


def test_few_groups_and_keys_are_kept_several_times():
    config = preset("bamba-9b")  # one group, eight heads of keys
    partition = Partition.of(config, 16)
    whole, own = StoreShape.of(config), partition.device_shape(StoreShape.of(config))
    heads, *rest = whole.arrays["ssm"].shape
    assert own.arrays["ssm"].shape == (heads // 16, *rest)
    assert own.arrays["conv_bc"].shape == whole.arrays["conv_bc"].shape
    assert own.arrays["kv"].shape == (2, *whole.arrays["kv"].shape[1:])
    assert partition.store_shape(whole).arrays["kv"].shape[0] == 2 * 16
    assert tuple(partition.parameter("blocks.0.mixer.in_proj_bc.weight")) == ()
    attention = config.pattern.index("*")
    assert tuple(partition.parameter(f"blocks.{attention}.mixer.k_proj.weight")) == ()


def test_what_nothing_declares_is_refused():
    partition = Partition.of(preset("nemotron-h-8b"), 4)
    with pytest.raises(ModelConfigError, match=r"nothing declares how the parameter blocks\.0\.mixer\.beta is divided"):
        partition.parameter("blocks.0.mixer.beta")
    with pytest.raises(ModelConfigError, match="no mixer declares the state delta"):
        partition.state({"ssm": None, "delta": None})
    layer = ShardedModule(RMSNorm(4, 1e-5, dtype=jnp.float32), {"bias": WHOLE})
    with pytest.raises(ModelConfigError, match="RMSNorm does not declare how its weight is divided over devices"):
        layer.placement("weight")


def test_one_device_has_everything():
    config = preset("nemotron-h-8b")
    assert Partition.of(config, 1).device_shape(StoreShape.of(config)) == StoreShape.of(config)


@pytest.mark.parametrize(
    ("name", "shards", "message"),
    [
        ("nemotron-h-8b", 3, "does not divide this model's 128 Mamba heads"),
        ("falcon-h1-34b", 8, "does not divide this model's 20 attention heads"),
        ("nemotron-h-8b", 64, "does not divide this model's 32 attention heads"),
    ],
)
def test_what_does_not_divide_is_refused(name, shards, message):
    with pytest.raises(ModelConfigError, match=f"tensor_parallel_size {shards} {message}"):
        Partition.of(preset(name), shards)


def test_too_few_devices_are_refused():
    with pytest.raises(ModelConfigError, match="JAX sees 8 cpu"):
        make_mesh(9)
