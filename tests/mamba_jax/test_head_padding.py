"""Query heads that are padded with zeros to divide over devices do not change the model's results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_config
from mamba_jax.config import AttentionConfig, HybridConfig, MLPConfig, ModelConfigError, QKNormConfig
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding import Partition, make_mesh
from tests.support.models.random_models import random_model

HIDDEN = 32
ATTENTION = AttentionConfig(num_heads=20, num_kv_heads=4, head_dim=8, scale=0.3, input_size=HIDDEN)
CONFIG = HybridConfig(
    family="test", vocab_size=64, hidden_size=HIDDEN, pattern="*-*-", norm_eps=1e-5, attention=ATTENTION,
    mlp=MLPConfig(intermediate_size=256, activation="silu", gated=True),
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True, "qk_norm": QKNormConfig(1e-5)}, {"output_gate": True}, {"num_heads": 5, "num_kv_heads": 1}],
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
    expected, got = (jax.nn.log_softmax(each(tokens)) for each in (model, padded))
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_states_and_other_parameters_keep_their_shapes():
    config = load_config("falcon-h1-34b")
    padding = HeadPadding.of(config, 8)
    assert padding.notice == "20 attention heads are padded with zeros to 24, which adds 1.1% to the weights"
    assert [array.shape for array in padding.padded.attention.state()] == [
        array.shape for array in config.attention.state()
    ]
    changed = {path.split(".", 2)[2] for path in parameters(HybridModel.abstract(config)) if padding.pads(path)}
    assert changed == {"mixer.attention.q_proj.weight", "mixer.attention.o_proj.weight"}
    Partition.of(padding.padded, 8)


def test_heads_that_divide_are_not_padded():
    padding = HeadPadding.of(CONFIG, 4)
    assert not padding
    assert padding.padded is CONFIG
    assert not HeadPadding.of(HeadPadding.of(CONFIG, 8).padded, 8)


@pytest.mark.parametrize(
    ("changes", "shards", "message"),
    [
        (
            {"mlp": MLPConfig(intermediate_size=8, activation="silu", gated=True), "attention": {"num_heads": 4}},
            8,
            r"does not divide this model's 4 attention heads; padding them to 8 would add \d\d% to the weights "
            r"\(at most 25% is allowed\)",
        ),
        (
            {"attention": {"qk_norm": QKNormConfig(1e-5, all_heads=True)}},
            8,
            "20 attention heads, which cannot be padded: a norm takes the mean over all of them",
        ),
        ({"attention": {"num_heads": 6, "num_kv_heads": 3}}, 8, "does not divide this model's 6 attention heads"),
        ({"mlp": MLPConfig(intermediate_size=36, activation="silu", gated=True)}, 8, "36 MLP channels"),
    ],
)
def test_a_model_that_padding_cannot_divide_is_refused(changes, shards, message):
    attention = dataclasses.replace(ATTENTION, **changes.get("attention", {}))
    config = dataclasses.replace(CONFIG, **(changes | {"attention": attention}))
    with pytest.raises(ModelConfigError, match=message):
        Partition.of(HeadPadding.of(config, shards).padded, shards)


def test_groups_of_a_quantized_weight_larger_than_a_head_are_refused():
    padding = HeadPadding.of(CONFIG, 8)
    path = "blocks.0.mixer.o_proj.weight"
    assert padding.shape(f"{path}.values", (32, 160)) == (32, 192)
    assert padding.shape(f"{path}.group_scale", (20, 32)) == (24, 32)
    assert padding.shape(f"{path}.channel_scale", (32,)) == (32,)
    with pytest.raises(ModelConfigError, match="quantized in 5 groups, which do not divide into 20 attention heads"):
        padding.shape(f"{path}.group_scale", (5, 32))
