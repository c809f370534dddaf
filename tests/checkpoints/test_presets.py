"""Published sizes: each configuration gives the published number of parameters."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from checkpoints.presets import PRESETS, preset, preset_names
from mamba_jax.families import weight_names
from mamba_jax.model import HybridModel, parameters
from mamba_jax.store import StoreShape


@pytest.mark.smoke
@pytest.mark.parametrize("name", preset_names())
def test_has_the_published_number_of_parameters(name):
    shapes = {path: leaf.get_value().shape for path, leaf in parameters(HybridModel.abstract(preset(name))).items()}
    counted = sum(math.prod(shape) for path, shape in shapes.items() if not path.startswith("mtp."))
    assert counted == pytest.approx(PRESETS[name].parameters, rel=0.01)
    assert weight_names(preset(name)).keys() == shapes.keys()


def test_the_draft_layer_of_nemotron_3_super_is_kept():
    config = preset("nemotron-3-super-120b-a12b")
    assert config.mtp_pattern == "*E"
    assert HybridModel.abstract(config).mtp is not None


@pytest.mark.parametrize(
    ("name", "slot_mib", "kv_kib"),
    [
        ("qwen3-next-80b-a3b", 73.7, 24),
        ("qwen3.5-9b", 49.1, 32),
        ("qwen3.5-27b", 146.8, 64),
        ("qwen3.5-35b-a3b", 61.4, 20),
        # Not reported: 20 states of 2 MiB with their windows, and 7 latents of 576 numbers.
        ("kimi-linear-48b-a3b", 41.4, 7.875),
        # Not reported: 35 states of 2 MiB with their windows, and 7 latents of 576 numbers.
        ("ling-3.0-flash", 72.46, 7.875),
        # Not reported: 70 states of 4 MiB, and 8 keys and values of 128 numbers in 10 layers.
        ("minimax-text-01", 280, 40),
        # Not reported: 64 states of 512 KiB with windows of 48 KiB.
        ("falcon-mamba-7b", 35, 0),
        # Not reported: 28 such states, and 8 keys and values of 128 numbers in 4 layers.
        ("jamba-1.5-mini", 15.3, 16),
        # Not reported: 18 states of 10 KiB with windows of 15 KiB, and one key and value of 256 numbers in 8 layers.
        ("recurrentgemma-2b", 0.44, 8),
    ],
)
def test_state_of_a_sequence_is_as_large_as_users_report(name, slot_mib, kv_kib):
    # States in float32, windows and keys and values in bfloat16, without the draft layer.
    shape = StoreShape.of(dataclasses.replace(preset(name), mtp_pattern=""))
    assert shape.bytes_per_slot(jnp.bfloat16) / 2**20 == pytest.approx(slot_mib, abs=0.1)
    assert shape.bytes_per_page(1, jnp.bfloat16) == kv_kib * 1024


def test_layers_are_as_many_as_published():
    for name, (mamba, attention, mlp_or_moe) in {
        "nemotron-h-8b": (24, 4, 24),
        "nemotron-h-56b": (54, 10, 54),
        "nemotron-nano-9b-v2": (27, 4, 25),
        "nemotron-3-nano-30b-a3b": (23, 6, 23),
        "nemotron-3-super-120b-a12b": (40, 8, 40),
        "bamba-9b": (29, 3, 32),
        "granite-4.0-h-small": (36, 4, 40),
        "falcon-h1-34b": (72, 72, 72),
        "zamba2-7b": (81, 13, 0),
        "qwen3-next-80b-a3b": (36, 12, 48),
        "qwen3.5-27b": (48, 16, 64),
        "qwen3.5-35b-a3b": (30, 10, 40),
        "kimi-linear-48b-a3b": (20, 7, 27),
        "ling-3.0-flash": (35, 7, 42),
        "minimax-text-01": (70, 10, 80),
        "falcon-mamba-7b": (64, 0, 0),
        "jamba-1.5-large": (63, 9, 72),
        "recurrentgemma-2b": (18, 8, 26),
    }.items():
        config = preset(name)
        assert config.num_recurrent_layers == mamba, name
        assert config.num_attention_uses == attention, name
        assert sum(config.pattern.count(kind) for kind in "-E") == mlp_or_moe, name
