"""The config.json of published sizes: read and built without weights."""

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
def test_a_preset_has_the_published_number_of_parameters(name):
    config, abstract = preset(name), HybridModel.abstract(preset(name))
    shapes = {path: leaf.shape for path, leaf in parameters(abstract).items()}
    counted = sum(math.prod(shape) for path, shape in shapes.items() if not path.startswith("mtp."))
    assert counted == pytest.approx(PRESETS[name].parameters, rel=0.01)
    assert weight_names(config).keys() == shapes.keys()


@pytest.mark.parametrize(
    ("name", "layers", "slot_mib", "kv_kib"),
    [
        ("nemotron-h-8b", (24, 4, 24), None, None),
        ("nemotron-h-56b", (54, 10, 54), None, None),
        ("nemotron-nano-9b-v2", (27, 4, 25), None, None),
        ("nemotron-3-nano-30b-a3b", (23, 6, 23), None, None),
        ("nemotron-3-super-120b-a12b", (40, 8, 40), None, None),
        ("bamba-9b", (29, 3, 32), None, None),
        ("granite-4.0-h-small", (36, 4, 40), None, None),
        ("falcon-h1-34b", (72, 72, 72), None, None),
        ("zamba2-7b", (81, 13, 0), None, None),
        # As users report.
        ("qwen3-next-80b-a3b", (36, 12, 48), 73.7, 24),
        ("qwen3.5-9b", (24, 8, 32), 49.1, 32),
        ("qwen3.5-27b", (48, 16, 64), 146.8, 64),
        ("qwen3.5-35b-a3b", (30, 10, 40), 61.4, 20),
        # Not reported: 20 states of 2 MiB with their windows, and 7 latents of 576 numbers.
        ("kimi-linear-48b-a3b", (20, 7, 27), 41.4, 7.875),
        # 35 states of 2 MiB with their windows, and 7 latents of 576 numbers.
        ("ling-3.0-flash", (35, 7, 42), 72.46, 7.875),
        # 70 states of 4 MiB, and 8 keys and values of 128 numbers in 10 layers.
        ("minimax-text-01", (70, 10, 80), 280, 40),
        # 64 states of 512 KiB with windows of 48 KiB.
        ("falcon-mamba-7b", (64, 0, 0), 35, 0),
        # 28 such states, and 8 keys and values of 128 numbers in 4 layers.
        ("jamba-1.5-mini", (28, 4, 32), 15.3, 16),
        ("jamba-1.5-large", (63, 9, 72), None, None),
        # 18 states of 10 KiB with windows of 15 KiB, and one key and value of 256 numbers in 8 layers.
        ("recurrentgemma-2b", (18, 8, 26), 0.44, 8),
    ],
)
def test_layers_and_states_are_as_published(name, layers, slot_mib, kv_kib):
    config = preset(name)
    mlp_or_moe = sum(config.pattern.count(kind) for kind in "-E")
    assert (config.num_recurrent_layers, config.num_attention_uses, mlp_or_moe) == layers
    if slot_mib is not None:
        # States in float32, windows and keys and values in bfloat16, without the draft layer.
        shape = StoreShape.of(dataclasses.replace(config, mtp_pattern=""))
        assert shape.bytes_per_slot(jnp.bfloat16) / 2**20 == pytest.approx(slot_mib, abs=0.1)
        assert shape.bytes_per_page(1, jnp.bfloat16) == kv_kib * 1024


def test_the_draft_layer_of_nemotron_3_super_is_kept():
    config = preset("nemotron-3-super-120b-a12b")
    assert config.mtp_pattern == "*E"
    assert HybridModel.abstract(config).mtp is not None
