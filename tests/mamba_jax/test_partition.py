"""What is divided over devices, for every published size, and what is refused; and query heads that are padded with
zeros to divide, which do not change the model's results.
"""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_config
from checkpoints.presets import PRESETS
from mamba_jax.config import WHOLE, AttentionConfig, HybridConfig, MLPConfig, ModelConfigError, QKNormConfig
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.basic import RMSNorm
from mamba_jax.sharding import CONTEXT, TENSOR, Partition, make_mesh
from mamba_jax.sharding.across import ShardedModule
from mamba_jax.sharding.axis import has_slow_links
from mamba_jax.sharding.parameters import placements
from mamba_jax.store import StoreShape
from tests.support.models.random_models import random_model

OF_EVERY_FAMILY = list({(load_config(name).family, load_config(name).moe is None): name for name in PRESETS}.values())
# All other arrays of a million numbers or more are divided.
MAY_BE_WHOLE = re.compile(r"router|latent_(in|out|proj)|adapters.*\.down|in_proj_bc|[kv]_proj|adapters\.[kv]\.")


def divides(config, shards):
    try:
        return bool(Partition.of(config, shards))
    except ModelConfigError:
        return False


@pytest.mark.parametrize("name", OF_EVERY_FAMILY)
def test_every_parameter_is_declared_and_all_that_is_large_is_divided(name):
    config = load_config(name)
    few = re.sub(r"(.+?)\1{2,}", r"\1\1", config.pattern)  # repeated layers are divided alike
    config = dataclasses.replace(config, pattern=few, own_mtp_embedding=bool(config.mtp_pattern))
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
    config = load_config("bamba-9b")  # one group, eight heads of keys
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
    partition = Partition.of(load_config("nemotron-h-8b"), 4)
    with pytest.raises(ModelConfigError, match=r"nothing declares how the parameter blocks\.0\.mixer\.beta is divided"):
        partition.parameter("blocks.0.mixer.beta")
    with pytest.raises(ModelConfigError, match="no mixer declares the state delta"):
        partition.state({"ssm": None, "delta": None})
    layer = ShardedModule(RMSNorm(4, 1e-5, dtype=jnp.float32), {"bias": WHOLE})
    with pytest.raises(ModelConfigError, match="RMSNorm does not declare how its weight is divided over devices"):
        layer.placement("weight")


HIDDEN = 32
ATTENTION = AttentionConfig(num_heads=20, num_kv_heads=4, head_dim=8, scale=0.3, input_size=HIDDEN)
CONFIG = HybridConfig(
    family="test", vocab_size=64, hidden_size=HIDDEN, pattern="*-*-", norm_eps=1e-5, attention=ATTENTION,
    mlp=MLPConfig(intermediate_size=256, activation="silu", gated=True),
)  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize(
    "changes",
    [{"bias": True, "qk_norm": QKNormConfig(1e-5), "output_gate": True}, {}, {"num_heads": 5, "num_kv_heads": 1}],
)
def test_results_are_those_of_the_model_without_padding(changes):
    config = dataclasses.replace(CONFIG, attention=dataclasses.replace(ATTENTION, **changes))
    mesh, model = make_mesh(8), random_model(config)
    padding = HeadPadding.of(config, 8)
    assert padding.padded.attention.num_heads == {20: 24, 5: 8}[config.attention.num_heads]
    values = padding.values({path: leaf[...] for path, leaf in parameters(model).items()}, mesh)
    for path in ("q_proj", "o_proj"):
        weight = values[f"blocks.0.mixer.{path}.weight"]
        assert weight.sharding.shard_shape(weight.shape) != weight.shape
    padded = HybridModel.from_parameters(padding.padded, values)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 17)))
    run = jax.jit(lambda model: jax.nn.log_softmax(model(tokens)))
    expected, got = run(model), run(padded)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_states_and_other_parameters_keep_their_shapes():
    config = dataclasses.replace(load_config("falcon-h1-34b"), pattern="P-P-")
    padding = HeadPadding.of(config, 8)
    assert padding.notice == "20 attention heads are padded with zeros to 24, which adds 0.3% to the weights"
    assert [x.shape for x in padding.padded.attention.state()] == [x.shape for x in config.attention.state()]
    changed = {path.split(".", 2)[2] for path in parameters(HybridModel.abstract(config)) if padding.pads(path)}
    assert changed == {"mixer.attention.q_proj.weight", "mixer.attention.o_proj.weight"}
    Partition.of(padding.padded, 8)


def test_heads_that_divide_are_not_padded():
    padding = HeadPadding.of(CONFIG, 4)
    assert not padding
    assert padding.padded is CONFIG
    assert not HeadPadding.of(HeadPadding.of(CONFIG, 8).padded, 8)


@pytest.mark.parametrize(
    ("attention", "channels", "message"),
    [
        ({"num_heads": 4}, 8, r"does not divide this model's 4 attention heads; padding them to 8 would add \d\d% to "
         r"the weights \(at most 25% is allowed\)"),
        ({"qk_norm": QKNormConfig(1e-5, all_heads=True)}, 256,
         "20 attention heads, which cannot be padded: a norm takes the mean over all of them"),
        ({"num_heads": 6, "num_kv_heads": 3}, 256, "does not divide this model's 6 attention heads"),
        ({}, 36, "36 MLP channels"),
    ],
)  # fmt: skip
def test_a_model_that_padding_cannot_divide_is_refused(attention, channels, message):
    attention, mlp = dataclasses.replace(ATTENTION, **attention), MLPConfig(channels, activation="silu", gated=True)
    config = dataclasses.replace(CONFIG, attention=attention, mlp=mlp)
    with pytest.raises(ModelConfigError, match=message):
        Partition.of(HeadPadding.of(config, 8).padded, 8)


def test_groups_of_a_quantized_weight_larger_than_a_head_are_refused():
    padding = HeadPadding.of(CONFIG, 8)
    path = "blocks.0.mixer.o_proj.weight"
    assert padding.shape(f"{path}.values", (32, 160)) == (32, 192)
    assert padding.shape(f"{path}.group_scale", (20, 32)) == (24, 32)
    assert padding.shape(f"{path}.channel_scale", (32,)) == (32,)
    with pytest.raises(ModelConfigError, match="quantized in 5 groups, which do not divide into 20 attention heads"):
        padding.shape(f"{path}.group_scale", (5, 32))


@pytest.mark.parametrize(
    ("platform", "processes", "slices", "slow"),
    [("cpu", "0011", "0000", 1), ("gpu", "0101", "0000", 0), ("tpu", "0123", "0000", 0), ("tpu", "0011", "0011", 1)],
)
def test_links_between_members_on_several_hosts_or_slices_are_slow(platform, processes, slices, slow):
    """Two members of two devices; links within a member are not those between members."""
    places = zip(map(int, processes), map(int, slices), strict=True)
    found = [SimpleNamespace(platform=platform, process_index=host, slice_index=slice) for host, slice in places]
    mesh = SimpleNamespace(shape={CONTEXT: 2, TENSOR: 2}, devices=np.array(found).reshape(2, 2))
    assert has_slow_links(mesh) == slow
    assert not has_slow_links(make_mesh(1, members=2))
