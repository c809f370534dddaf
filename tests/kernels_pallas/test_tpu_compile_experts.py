"""The experts' products compiled by the TPU's own compiler, for every published size and whole and divided over 4 and 8
devices: nothing but the kernel touches the weights.

A few with --full; all with --slow.
"""

import functools

import pytest
from jax.sharding import PartitionSpec
from real_shapes import BF16, I32, shape
from topology import SLICES, compile_for_tpu

from checkpoints.presets import preset, preset_names
from kernels_pallas.grouped_matmul import grouped_matmul
from mamba_jax.config import MOE
from mamba_jax.sharding import TENSOR, Partition
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

MOST = 10e6
"""Bytes in addition to the weights."""


def products(name, devices):
    """The shapes [experts, outputs, inputs] of the two products of a layer on one device."""
    config = preset(name)
    moe, layer = config.moe, f"blocks.{config.pattern.index(MOE)}.mixer.experts"
    width = moe.latent_size or config.hidden_size
    sizes = {
        "up": (moe.num_experts, *([2] if moe.gated else []), moe.intermediate_size, width),
        "down": (moe.num_experts, width, moe.intermediate_size),
    }
    partition = Partition.of(config, devices)
    for which, whole in sizes.items():
        experts, *outputs, inputs = _piece(whole, partition.parameter(f"{layer}.{which}"), devices)
        yield experts, functools.reduce(int.__mul__, outputs), inputs


def _piece(whole, spec: PartitionSpec, devices):
    axes = [*spec, *[None] * (len(whole) - len(spec))]
    return [size // devices if axis == TENSOR else size for size, axis in zip(whole, axes, strict=True)]


ALL = [
    (chip, name, devices)
    for chip in SLICES
    for name in preset_names()
    if preset(name).moe is not None
    for devices in (1, 4, 8)
]
FEW = [
    ("v5e", "nemotron-3-nano-30b-a3b", 1),
    ("v6e", "nemotron-3-nano-30b-a3b", 8),
    ("tpu7x", "granite-4.0-h-small", 4),
]


@pytest.mark.parametrize(
    ("chip", "name", "devices"), [pytest.param(*c, marks=[] if c in FEW else pytest.mark.slow) for c in ALL]
)
@pytest.mark.parametrize("tokens", [384, slow(12288)])
def test_only_the_kernel_touches_the_weights(chip, name, devices, tokens):
    run = functools.partial(grouped_matmul, implementation="pallas_tpu")
    for experts, outputs, inputs in products(name, devices):
        weights = shape(experts, outputs, inputs, dtype=BF16)
        compiled = compile_for_tpu(chip, run, shape(tokens, inputs, dtype=BF16), weights, shape(experts, dtype=I32))
        # A prompt's tokens may be brought into whole blocks, on their way in and out.
        moved = 4 * tokens * (inputs + outputs) if tokens > 384 else 0
        assert compiled.memory_analysis().temp_size_in_bytes < MOST + moved
        assert "tpu_custom_call" in compiled.as_text()
